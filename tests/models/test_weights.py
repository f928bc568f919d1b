"""Checkpoints load whole or are refused by the name of the file or tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import load, make_model, new_cache, random_ids, run
from torch import Tensor

from dspark.errors import CheckpointError

PAGES = list(range(8))
IDS = random_ids(20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_model("qwen3", tie_word_embeddings=False).save_pretrained(folder)
    return folder


def logits_of(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    decoder = load(folder, dtype)
    return run(decoder, new_cache(decoder), [(IDS, 0, PAGES)])[0]


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part in range(2):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        chosen = names[part::2]
        save_file({name: tensors[name] for name in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_load_like_one_file(folder: Path) -> None:
    whole = logits_of(folder)
    shard(folder)
    assert torch.equal(logits_of(folder), whole)


def test_bfloat16_on_cpu_stays_near_float32(folder: Path) -> None:
    full, half = logits_of(folder), logits_of(folder, torch.bfloat16)
    assert half.dtype == torch.float32
    assert (half - full).abs().max() < 0.05 * full.abs().max()


def test_float16_file_loads_as_float32(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: t.half().float() for name, t in tensors.items()}))
    rounded = logits_of(folder)
    rewrite(folder, lambda tensors: tensors.update({name: t.half() for name, t in tensors.items()}))
    assert torch.equal(logits_of(folder), rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loaded_weights_do_not_depend_on_the_file_any_more(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
    decoder = load(folder, dtype)
    before = run(decoder, new_cache(decoder), [(IDS, 0, PAGES)])[0]
    path = folder / "model.safetensors"
    header_size = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    with path.open("r+b") as file:
        file.seek(header_size)
        file.write(b"\xff" * (path.stat().st_size - header_size))
    assert torch.equal(run(decoder, new_cache(decoder), [(IDS, 0, PAGES)])[0], before)


def test_a_head_stored_beside_a_tied_embedding_is_ignored(tmp_path: Path) -> None:
    make_model("llama-tied").save_pretrained(tmp_path)
    expected = logits_of(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(97, 48)}))
    assert torch.equal(logits_of(tmp_path), expected)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_multimodal_gemma3_checkpoint_loads_its_text_part(tmp_path: Path, prefix: str) -> None:
    make_model("gemma3").save_pretrained(tmp_path)
    expected = logits_of(tmp_path)
    text_config = json.loads((tmp_path / "config.json").read_text())
    raw = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text_config,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            inner = name if prefix == "language_model." else name.removeprefix("model.")
            tensors[prefix + inner] = tensors.pop(name)
        tensors["model.vision_tower.weight"] = torch.zeros(2)
        tensors["multi_modal_projector.weight"] = torch.zeros(2)

    rewrite(tmp_path, rename)
    assert torch.equal(logits_of(tmp_path), expected)


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_norm\.weight is missing"):
        load(folder)


def test_missing_head_of_an_untied_model_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load(folder)


def test_unexpected_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.extra\.weight .* is not part of the model"):
        load(folder)


def test_ill_shaped_tensor_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* shape \[47\], config\.json asks for \[48\]"):
        load(folder)


def test_integer_weights_are_refused_as_quantised(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* int8; quantised"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 400, 20_000])
def test_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(folder)


def test_index_that_names_an_absent_shard_is_refused(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors does not exist but .*index"):
        load(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/other/model.safetensors", "..", "", "weights.bin"])
def test_index_that_names_a_shard_elsewhere_is_refused(folder: Path, name: str) -> None:
    other = folder.parent / "other"
    other.mkdir()
    (folder / "model.safetensors").rename(other / "model.safetensors")
    name = str(other / "model.safetensors") if name.startswith("/") else name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json names the shard .*beside the index"):
        load(folder)


def test_index_without_a_weight_map_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load(folder)


def test_folder_without_safetensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        load(folder)
