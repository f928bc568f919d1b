"""The algorithms of speculative decoding: sampling, proposers, verification. Knows nothing of the engine."""
