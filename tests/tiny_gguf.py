"""A tiny Llama in a GGUF file, plain or quantised, with a small byte-level tokenizer, as llama.cpp would store it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import transformers
from tokenizers import pre_tokenizers

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "h e", "l l", "he ll", "hell o"]
TOKENS = [
    *SPECIAL_TOKENS,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
]
_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    model: transformers.LlamaForCausalLM,
    *,
    architecture: str = "llama",
    without: str | None = None,
    extra: str | None = None,
    scales_rotary: str | None = None,
    quantization: Callable[[str], gguf.GGMLQuantizationType | None] = lambda name: None,
) -> None:
    """Write `model` (its vocabulary must have `len(TOKENS)` rows) to `path`.

    `without` names a parameter to leave out, `extra` a tensor to add; `scales_rotary` is "tensor" or "keys", the two
    ways a file says so. `quantization` gives the block format of a tensor by its name in the file; None: F32.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(TOKENS) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    if scales_rotary == "keys":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
    if scales_rotary == "tensor":
        writer.add_tensor("rope_freqs.weight", np.array([1.0, 1.0, 8.0, 8.0], dtype=np.float32))
    if extra is not None:
        writer.add_tensor(extra, np.ones(config.hidden_size, dtype=np.float32))
    for name, parameter in model.named_parameters():
        if name != without:
            stored_name, values = _stored(name, parameter.detach().numpy(), config)
            kind = quantization(stored_name)
            if kind is None:
                writer.add_tensor(stored_name, values)
            else:
                writer.add_tensor(stored_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(name: str, values: np.ndarray, config: transformers.LlamaConfig) -> tuple[str, np.ndarray]:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight", values
    if name == "model.norm.weight":
        return "output_norm.weight", values
    if name == "lm_head.weight":
        return "output.weight", values
    _, _, block, rest = name.split(".", 3)
    inner = rest.removesuffix(".weight")
    for projection, heads in (
        ("self_attn.q_proj", config.num_attention_heads),
        ("self_attn.k_proj", config.num_key_value_heads),
    ):
        if inner == projection:  # llama.cpp pairs neighbouring rows, Hugging Face the halves of a head
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return f"blk.{block}.{_BLOCK_NAMES[inner]}.weight", values
