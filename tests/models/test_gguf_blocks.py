"""The blocks of a quantised GGUF file are kept, mean its weights, and are what the kernels compute from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from tiny_gguf import TOKENS, write_gguf
from tiny_models import CPU, make_model, new_cache, random_ids, run

from dspark.errors import CheckpointError, ConfigError
from dspark.models import kernels
from dspark.models.gguf_blocks import BLOCKS_NAME, open_blocks
from dspark.models.kernels import WeightFormat
from dspark.models.model_source import resolve_model
from dspark.models.weights import load_decoder

IDS = random_ids(12)
KINDS = {
    "token_embd.weight": GGMLQuantizationType.Q8_0,
    "blk.0.attn_q.weight": GGMLQuantizationType.Q4_1,
    "blk.0.attn_k.weight": GGMLQuantizationType.Q4_1,
    "blk.0.attn_v.weight": GGMLQuantizationType.Q4_1,
    "blk.1.attn_v.weight": GGMLQuantizationType.Q4_0,
    "blk.1.ffn_down.weight": GGMLQuantizationType.Q5_0,  # not a format of the kernels
    "blk.1.attn_output.weight": GGMLQuantizationType.Q4_0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", vocab_size=len(TOKENS), hidden_size=96, intermediate_size=160)
    path = tmp_path_factory.mktemp("gguf") / "quantised.gguf"
    write_gguf(path, model, quantization=KINDS.get)
    return resolve_model(str(path), cache_dir=tmp_path_factory.mktemp("cache")).path


def test_blocks_mean_the_dense_weights_row_by_row(folder: Path) -> None:
    dense, blocks = load_file(folder / "model.safetensors"), open_blocks(folder)
    assert blocks is not None

    expected = {
        "model.embed_tokens.weight": WeightFormat.Q8_0,
        "model.layers.0.self_attn.q_proj.weight": WeightFormat.Q4_1,
        "model.layers.0.self_attn.k_proj.weight": WeightFormat.Q4_1,
        "model.layers.0.self_attn.v_proj.weight": WeightFormat.Q4_1,
        "model.layers.1.self_attn.v_proj.weight": WeightFormat.Q4_0,
        "model.layers.1.self_attn.o_proj.weight": WeightFormat.Q4_0,
    }
    for name, tensor in dense.items():
        rows = blocks.read(name)
        assert (None if rows is None else rows.format) == expected.get(name), name
        assert rows is None or torch.equal(rows.dense(), tensor.float()), name


@pytest.mark.skipif(not kernels.instruction_set(), reason="no compiled kernels here")
@pytest.mark.parametrize("weights", ["auto", "gguf"])
def test_a_decoder_of_blocks_computes_what_the_dense_one_does(folder: Path, weights: str, tmp_path: Path) -> None:
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns(BLOCKS_NAME))
    dense = load_decoder(plain, dtype=torch.float32, device=CPU, weights="float32")
    decoder = load_decoder(folder, dtype=torch.float32, device=CPU, weights=weights)

    assert (decoder.num_weight_bytes, dense.num_weight_bytes) == (868_800, 952_320)
    torch.testing.assert_close(decoder.embed(torch.tensor(IDS)), dense.embed(torch.tensor(IDS)), rtol=0, atol=0)
    for got, expected in zip(
        *(run(each, new_cache(each), [(IDS, 0, [4, 0, 2, 5])]) for each in (decoder, dense)), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_file_without_such_blocks_says_so(tmp_path: Path, folder: Path) -> None:
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns(BLOCKS_NAME))
    assert open_blocks(plain) is None
    with pytest.raises(ConfigError, match="gguf"):
        load_decoder(plain, dtype=torch.float32, device=CPU, weights="gguf")


def test_damaged_blocks_are_an_error_that_names_the_file(tmp_path: Path, folder: Path) -> None:
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    (damaged / BLOCKS_NAME).write_bytes(b"\x10" * 64)
    with pytest.raises(CheckpointError, match=BLOCKS_NAME):
        load_decoder(damaged, dtype=torch.float32, device=CPU)
