"""The stored Qwen3 checkpoint gives the stored hidden states and logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import load
from torch import Tensor

from dspark.batch import BatchRow, build_forward_batch
from dspark.models.kv_cache import KVCache

FOLDER = Path(__file__).parents[1] / "fixtures" / "tiny_target"


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return load_file(FOLDER / "case.safetensors")


@pytest.fixture(scope="module")
def outputs(expected: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Final hidden states, taps of the embedding and of all layers, logits."""
    decoder = load(FOLDER)
    ids = expected["input_ids"].tolist()
    cache = KVCache(decoder.config, 3, 16, torch.float32, "cpu")
    batch = build_forward_batch([BatchRow(token_ids=ids, start_position=0, page_ids=[2, 0, 1])], page_size=16)
    with torch.inference_mode():
        hidden, taps = decoder.forward(batch, cache, tapped_layers=range(-1, 6))
        assert taps is not None
        return hidden, taps, decoder.compute_logits(hidden)


def test_final_hidden_states_equal_the_stored_ones(
    outputs: tuple[Tensor, Tensor, Tensor], expected: dict[str, Tensor]
) -> None:
    torch.testing.assert_close(outputs[0], expected["final_norm_hidden"], atol=1e-4, rtol=1e-4)


def test_layer_outputs_equal_the_stored_ones(
    outputs: tuple[Tensor, Tensor, Tensor], expected: dict[str, Tensor]
) -> None:
    layers = outputs[1].unflatten(1, (7, 64)).transpose(0, 1)
    torch.testing.assert_close(layers, expected["raw_hidden_states"], atol=1e-4, rtol=1e-4)


def test_logits_equal_the_stored_ones(outputs: tuple[Tensor, Tensor, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(outputs[2], expected["logits"], atol=1e-4, rtol=1e-4)
