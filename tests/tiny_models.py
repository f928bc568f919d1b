"""Random tiny checkpoints of every supported family, saved by transformers, and helpers to run our decoder on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor

from dspark.batch import BatchRow, build_forward_batch
from dspark.models.decoder import Decoder
from dspark.models.kv_cache import KVCache
from dspark.models.weights import load_decoder

VOCAB_SIZE = 97
PAGE_SIZE = 4
CPU = torch.device("cpu")

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "qwen3-yarn": (
        transformers.Qwen3Config,
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral-window": (transformers.MistralConfig, {"head_dim": 16, "sliding_window": 7}),
    "qwen2-window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "gemma2": (
        transformers.Gemma2Config,
        _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (transformers.Gemma3TextConfig, _GEMMA | {"sliding_window_pattern": 3}),
}


def make_model(family: str, **changes: object) -> transformers.PreTrainedModel:
    """Return a float32 model of `family` with random weights large enough that every part matters."""
    config_class, extra = FAMILIES[family]
    config = config_class(**(_SIZES | extra | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model.eval()


def random_ids(count: int, seed: int = 1) -> list[int]:
    """Return `count` token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist()


def hf_logits(model: transformers.PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Return transformers' logits [T, V] of one sequence in one pass."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Load our decoder from `folder`."""
    return load_decoder(folder, dtype=dtype, device=CPU)


def new_cache(decoder: Decoder, num_pages: int = 64) -> KVCache:
    """Return an empty cache of small pages."""
    return KVCache(decoder.config, num_pages, PAGE_SIZE, decoder.dtype, CPU)


@torch.inference_mode()
def run(decoder: Decoder, cache: KVCache, rows: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> list[Tensor]:
    """Run rows of (token ids, start position, page ids) in one pass; return the logits [T_r, V] of each row."""
    batch_rows = [
        BatchRow(token_ids=ids, start_position=start, page_ids=pages, num_logits=len(ids)) for ids, start, pages in rows
    ]
    batch = build_forward_batch(batch_rows, page_size=PAGE_SIZE)
    hidden, _ = decoder.forward(batch, cache)
    return list(decoder.compute_logits(hidden).split([len(ids) for ids, _, _ in rows]))
