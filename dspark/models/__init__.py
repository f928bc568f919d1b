"""What is computed: decoder, attention, KV cache, weights, tokenizer. Knows no requests and no policy."""
