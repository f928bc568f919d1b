"""Drafters in the package: found by the target's weights; what is there loads, fits its target and is small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from drafter_cases import CPU, make_config, make_tensors

from dspark.config import DEFAULT_MODEL
from dspark.errors import CheckpointError
from dspark.models import shipped_drafters
from dspark.models.drafter import Drafter, fit_vocabulary
from dspark.models.drafter_attention import DraftRow
from dspark.models.drafter_checkpoint import load_drafter_checkpoint, save_drafter
from dspark.models.drafter_config import DrafterConfig, check_target
from dspark.models.kv_cache import KVCache
from dspark.models.model_config import decoder_config_from
from dspark.models.model_source import EMBEDDED_SHA256, ModelFolder
from dspark.models.shipped_drafters import SHIPPED_DRAFTERS, models_with_shipped_drafter, shipped_drafter

MAX_BYTES = 25_000_000
EMBEDDED_TOKENIZER_SIZE = 49152
EMBEDDED = ModelFolder(path=Path("anywhere"), name=DEFAULT_MODEL, gguf_sha256=EMBEDDED_SHA256)


def embedded_like_config(**changes) -> DrafterConfig:
    """Return a drafter that fits the embedded model, pruned as the shipped one is, and else as small as can be."""
    return make_config(
        hidden_size=576, target_hidden_size=576, vocab_size=49152, draft_vocab_size=6144, num_heads=9, num_kv_heads=3,
        head_dim=64, intermediate_size=32, max_position=8192, tap_ids=(5, 20), num_target_layers=30, **changes,
    )  # fmt: skip


def save_without_head(folder: Path, config: DrafterConfig) -> Path:
    """Save a random drafter that leaves embedding and head to its target."""
    save_drafter(folder, config, make_tensors(config), layout="speculators", dtype=torch.float16, without_head=True)
    return folder


@torch.inference_mode()
def check_drafter_of_the_embedded_model(folder: Path, tmp_path: Path) -> None:
    """Load a drafter as the engine would for a model of the embedded one's shape, and draft with it."""
    assert sum(path.stat().st_size for path in folder.rglob("*")) <= MAX_BYTES
    target = tmp_path / "target"
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, vocab_size=EMBEDDED_TOKENIZER_SIZE, max_position_embeddings=8192,
    ).save_pretrained(target)  # fmt: skip
    target_config = decoder_config_from(target)
    weight = torch.zeros(EMBEDDED_TOKENIZER_SIZE, 576)
    weight[:, 0] = torch.linspace(-1, 1, EMBEDDED_TOKENIZER_SIZE)
    decoder = SimpleNamespace(config=target_config, embedding=weight, head_weight=lambda: weight)
    checkpoint = load_drafter_checkpoint(folder, dtype=torch.float32, device=CPU)
    check_target(checkpoint.config, target_config, tokenizer_size=EMBEDDED_TOKENIZER_SIZE)
    checkpoint = fit_vocabulary(checkpoint.completed(decoder), EMBEDDED_TOKENIZER_SIZE)
    drafter = Drafter(checkpoint.config, checkpoint.tensors)
    blocks = drafter.draft_blocks(
        [DraftRow(anchor_token_id=1, anchor_position=0, page_ids=[0, 1])],
        KVCache(drafter.config, 2, 16, drafter.dtype, CPU),
    )
    assert blocks.base_logits.isfinite().all()


def test_what_ships_for_the_embedded_model_loads_fits_and_is_small(tmp_path):
    """The package's own drafter where it has one (a checkout may not), a random one of its kind in any case."""
    made = save_without_head(tmp_path / "made", embedded_like_config())
    for folder in filter(None, (made, shipped_drafter(EMBEDDED))):
        check_drafter_of_the_embedded_model(folder, tmp_path)


def test_a_drafter_of_another_model_would_not_pass(tmp_path):
    made = save_without_head(tmp_path / "made", replace(embedded_like_config(), tap_ids=(5, 30)))
    with pytest.raises(CheckpointError, match="reads the output of target layer 30, this target has the layers"):
        check_drafter_of_the_embedded_model(made, tmp_path)


def test_no_folder_in_the_package_is_without_its_model():
    root = shipped_drafters.SHIPPED_FOLDER
    present = {path.name for path in root.iterdir()} if root.exists() else set()
    assert present <= set(SHIPPED_DRAFTERS.values())
    assert set(models_with_shipped_drafter()) == present


@pytest.fixture
def shipped_folder(tmp_path, monkeypatch):
    """A package that ships one drafter."""
    folder = tmp_path / "shipped" / DEFAULT_MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(shipped_drafters, "SHIPPED_FOLDER", tmp_path / "shipped")
    return folder


def test_the_weights_decide_and_not_the_name(shipped_folder):
    assert shipped_drafter(EMBEDDED) == shipped_folder
    assert shipped_drafter(replace(EMBEDDED, name="my copy of the GGUF file")) == shipped_folder
    assert shipped_drafter(replace(EMBEDDED, gguf_sha256=None)) is None
    assert shipped_drafter(replace(EMBEDDED, gguf_sha256="0" * 64)) is None
    assert models_with_shipped_drafter() == [DEFAULT_MODEL]


def test_a_package_without_drafters_ships_none(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped_drafters, "SHIPPED_FOLDER", tmp_path / "absent")
    assert shipped_drafter(EMBEDDED) is None
    assert models_with_shipped_drafter() == []
