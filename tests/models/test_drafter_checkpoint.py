"""Drafters are written and read back in both layouts, and read whole or refused by the name of the tensor."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import (
    CPU,
    DEEPSPEC,
    FIXTURES,
    SPECULATORS,
    PagedContext,
    change_config,
    change_tensors,
    copy_checkpoint,
    load,
    make_config,
    make_tensors,
    tiny_target,
)
from safetensors.torch import load_file

from dspark.errors import CheckpointError, ConfigError
from dspark.models import drafter_checkpoint
from dspark.models.drafter import Drafter
from dspark.models.drafter_attention import DraftRow
from dspark.models.drafter_checkpoint import DrafterCheckpoint, load_drafter_checkpoint, save_drafter

PAGES = [9, 2, 30, 7, 0, 21, 5, 13, 40, 3, 11, 28]


def read(folder: Path, layout: str = "auto") -> DrafterCheckpoint:
    return load_drafter_checkpoint(folder, dtype=torch.float32, device=CPU, layout=layout)


def completed(folder: Path) -> DrafterCheckpoint:
    return read(folder).completed(tiny_target())


def greedy_tokens(drafter: Drafter) -> list[int]:
    """Draft after some fixed context."""
    context = PagedContext.of(drafter)
    taps = torch.randn((11, drafter.config.feature_size), generator=torch.Generator().manual_seed(1))
    context.write(taps, torch.arange(11), PAGES)
    row = DraftRow(anchor_token_id=17, anchor_position=11, page_ids=PAGES)
    return context.draft([row]).target_ids[0].tolist()


@pytest.mark.parametrize("name", DEEPSPEC)
def test_deepspec_files_are_written_as_they_were(name: str, tmp_path: Path) -> None:
    checkpoint = read(FIXTURES / name)
    stored = load_file(FIXTURES / name / "model.safetensors")
    save_drafter(
        tmp_path / "out", checkpoint.config, checkpoint.tensors, layout="deepspec", dtype=stored["fc.weight"].dtype
    )
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[key], stored[key]) for key in stored)
    config, original = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", FIXTURES / name))
    ours = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache", "num_anchors"}
    assert {k: config.get(k) for k in original.keys() - ours} == {k: original[k] for k in original.keys() - ours}


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_files_are_written_as_they_were(name: str, tmp_path: Path) -> None:
    checkpoint = completed(FIXTURES / name)
    save_drafter(tmp_path / "out", checkpoint.config, checkpoint.tensors, layout="speculators")
    stored, written = (load_file(f / "model.safetensors") for f in (FIXTURES / name, tmp_path / "out"))
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[key], stored[key]) for key in stored)
    config, original = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", FIXTURES / name))
    layers, original_layers = config.pop("transformer_layer_config"), original.pop("transformer_layer_config")
    theirs = {"auto_map", "transformers_version"}
    assert {k: v for k, v in config.items() if k not in theirs} == {
        k: v for k, v in original.items() if k not in theirs
    }
    names = {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "use_cache"}
    assert {k: layers[k] for k in original_layers.keys() - names} == {
        k: original_layers[k] for k in original_layers.keys() - names
    }


@pytest.mark.parametrize("name", [*DEEPSPEC, *SPECULATORS])
def test_a_written_drafter_drafts_the_same(name: str, tmp_path: Path) -> None:
    layout = name.split("_")[0]
    checkpoint = completed(FIXTURES / name)
    save_drafter(tmp_path / "out", checkpoint.config, checkpoint.tensors, layout=layout)
    assert completed(tmp_path / "out").config == checkpoint.config
    assert greedy_tokens(load(tmp_path / "out")) == greedy_tokens(load(FIXTURES / name))


@pytest.mark.parametrize("name", DEEPSPEC)
def test_deepspec_drafters_can_be_written_for_speculators(name: str, tmp_path: Path) -> None:
    checkpoint = completed(FIXTURES / name)
    save_drafter(tmp_path / "out", checkpoint.config, checkpoint.tensors, layout="speculators")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [tap + 1 for tap in checkpoint.config.tap_ids]
    assert raw["sample_from_anchor"] is True
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert {"embed_tokens.weight", "lm_head.weight"}.isdisjoint(load_file(tmp_path / "out" / "model.safetensors"))
    assert greedy_tokens(load(tmp_path / "out")) == greedy_tokens(load(FIXTURES / name))


def test_a_speculators_drafter_of_full_attention_can_be_written_for_deepspec(tmp_path: Path) -> None:
    config = make_config(markov_head_type="rnn")
    own = {k: v for k, v in make_tensors(config).items() if k not in ("embed_tokens.weight", "lm_head.weight")}
    checkpoint = DrafterCheckpoint(config=config, tensors=own).completed(tiny_target())
    for layout in ("speculators", "deepspec"):
        save_drafter(tmp_path / layout, config, checkpoint.tensors, layout=layout)
    assert json.loads((tmp_path / "deepspec" / "config.json").read_text())["target_layer_ids"] == [-1, 2]
    assert greedy_tokens(load(tmp_path / "deepspec")) == greedy_tokens(load(tmp_path / "speculators"))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"samples_from_anchor": False}, "fill-in"),
        ({"draft_vocab_size": 100}, "pruned vocabulary"),
        ({"windows": (6, None)}, "sliding windows"),
        ({"is_causal": (True, False)}, "causal blocks"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"target_hidden_size": 32}, "hidden size"),
    ],
)
def test_what_deepspec_cannot_express_is_refused(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    config = make_config(**changes)
    with pytest.raises(ConfigError, match=f"deepspec layout cannot express .*{what}"):
        save_drafter(tmp_path / "out", config, make_tensors(config), layout="deepspec")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"windows": (6, 7)}, "different windows"),
        ({"windows": (6, 6), "is_causal": (True, False)}, "different windows or causality"),
        ({"is_causal": (True, True)}, "causal inside the block"),
    ],
)
def test_what_speculators_cannot_express_is_refused(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    config = make_config(**changes)
    with pytest.raises(ConfigError, match=f"speculators layout cannot express .*{what}"):
        save_drafter(tmp_path / "out", config, make_tensors(config), layout="speculators")


def test_a_pruned_vocabulary_is_written_as_offsets(tmp_path: Path) -> None:
    config = make_config(draft_vocab_size=100, samples_from_anchor=False, windows=(6, 6), is_causal=(False, False))
    tensors = make_tensors(config)
    save_drafter(tmp_path / "out", config, tensors, layout="speculators")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["lm_head.weight"].shape == (100, 64)
    assert written["d2t"].tolist() == list(range(100))
    assert written["t2d"].nonzero().flatten().tolist() == list(range(0, 200, 2))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["draft_vocab_size"], raw["sliding_window_non_causal"]) == (100, True)
    drafter = load(tmp_path / "out")
    expected = Drafter(config, tensors | {"embed_tokens.weight": tiny_target().embedding})
    assert greedy_tokens(drafter) == greedy_tokens(expected)
    assert all(token % 2 == 0 and token < 200 for token in greedy_tokens(drafter))


def test_a_pruned_head_that_is_not_stored_comes_from_the_rows_of_the_target(tmp_path: Path) -> None:
    config = make_config(draft_vocab_size=100)
    save_drafter(tmp_path / "out", config, make_tensors(config), layout="speculators")
    change_tensors(tmp_path / "out", lambda tensors: tensors.pop("lm_head.weight"))
    head = tiny_target().head_weight()
    assert torch.equal(completed(tmp_path / "out").tensors["lm_head.weight"], head[0:200:2])


def test_weights_can_be_stored_in_16_bit(tmp_path: Path) -> None:
    config = make_config()
    save_drafter(tmp_path / "out", config, make_tensors(config), layout="deepspec", dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert read(tmp_path / "out").tensors["fc.weight"].dtype == torch.float32


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(drafter_checkpoint, "save_file", fail)
    config = make_config()
    with pytest.raises(CheckpointError, match=r"out cannot be written: .*No space left"):
        save_drafter(tmp_path / "out", config, make_tensors(config), layout="deepspec")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    folder = copy_checkpoint("deepspec_gated", tmp_path / "out")
    before = (folder / "model.safetensors").read_bytes()
    config = make_config()
    with pytest.raises(ConfigError, match="exists already"):
        save_drafter(folder, config, make_tensors(config), layout="deepspec")
    assert (folder / "model.safetensors").read_bytes() == before


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    config = make_config()
    save_drafter(tmp_path, config, make_tensors(config), layout="deepspec")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_saving_needs_the_embedding_where_the_layout_stores_it(tmp_path: Path) -> None:
    config = make_config()
    tensors = make_tensors(config)
    del tensors["embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is needed in the deepspec layout"):
        save_drafter(tmp_path / "out", config, tensors, layout="deepspec")


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "hidden_norm.weight",
        "layers.1.self_attn.q_norm.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.bias",
    ],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    """Case I8."""
    folder = copy_checkpoint("deepspec_gated", tmp_path / "drafter")
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"tensor {name} is missing"):
        load(folder)


def test_a_renamed_markov_tensor_is_refused(tmp_path: Path) -> None:
    """Case I8."""
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    change_tensors(folder, lambda t: t.update({"markov_head.w1.weight": t.pop("markov_head.markov_w1.weight")}))
    with pytest.raises(CheckpointError, match=r"markov_head\.markov_w1\.weight is missing"):
        load(folder)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    """The gate of a gated head in a drafter whose configuration says vanilla."""
    folder = copy_checkpoint("deepspec_gated", tmp_path / "drafter")
    change_config(folder, markov_head_type="vanilla")
    with pytest.raises(CheckpointError, match=r"markov_head\.gate_proj\.bias .* is not part of the model"):
        load(folder)


def test_an_ill_shaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    """Case I8."""
    folder = copy_checkpoint("speculators_anchor", tmp_path / "drafter")
    change_tensors(folder, lambda t: t.update({"fc.weight": torch.zeros(64, 128)}))
    with pytest.raises(CheckpointError, match=r"fc\.weight .* \[64, 128\], config\.json asks for \[64, 192\]"):
        load(folder)


def test_confidence_weights_without_the_setting_are_refused(tmp_path: Path) -> None:
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    change_config(folder, enable_confidence_head=False)
    with pytest.raises(CheckpointError, match=r"confidence_head\.proj\.bias .* is not part of the model"):
        load(folder)


def test_a_drafter_without_a_confidence_head_is_usable(tmp_path: Path) -> None:
    """Case I8."""
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    change_config(folder, enable_confidence_head=False)
    change_tensors(folder, lambda t: [t.pop(key) for key in list(t) if key.startswith("confidence_head.")])
    drafter = load(folder)
    assert not drafter.config.has_confidence_head
    assert greedy_tokens(drafter) == greedy_tokens(load(FIXTURES / "deepspec_vanilla"))


def test_copies_of_the_verifier_are_ignored(tmp_path: Path) -> None:
    folder = copy_checkpoint("speculators_anchor", tmp_path / "drafter")
    change_tensors(folder, lambda t: t.update({"verifier_lm_head.weight": torch.zeros(3, 3)}))
    assert "verifier_lm_head.weight" not in read(folder).tensors


def test_python_beside_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    folder = copy_checkpoint("speculators_anchor", tmp_path / "drafter")
    (folder / "config.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise SystemExit\n")
    change_config(folder, auto_map={"AutoConfig": "config.DSparkSpeculatorConfig"}, trust_remote_code=True)
    load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_narrower_drafter_without_its_own_embedding_is_refused(tmp_path: Path) -> None:
    config = make_config(hidden_size=32)
    save_drafter(tmp_path / "out", config, make_tensors(config), layout="speculators")
    with pytest.raises(CheckpointError, match=r"its hidden size \(32\) is not the target's \(64\)"):
        load(tmp_path / "out")


def test_a_pruned_vocabulary_beyond_the_target_is_refused(tmp_path: Path) -> None:
    """Both with a head of its own and with rows of the target's."""
    config = make_config(vocab_size=300, draft_vocab_size=140)
    save_drafter(tmp_path / "out", config, make_tensors(config), layout="speculators")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="names id 278, the target's vocabulary has 256 rows"):
            load(tmp_path / "out")
        change_tensors(tmp_path / "out", lambda t: t.pop("lm_head.weight", None))


def test_older_speculators_files_with_their_own_embedding_use_it(tmp_path: Path) -> None:
    folder = copy_checkpoint("speculators_anchor", tmp_path / "drafter")
    own = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    change_tensors(folder, lambda t: t.update({"embed_tokens.weight": own, "lm_head.weight": own.clone()}))
    tensors = completed(folder).tensors
    assert torch.equal(tensors["embed_tokens.weight"], own)
    assert torch.equal(tensors["lm_head.weight"], own)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), "tensor d2t is missing"),
        (lambda t: t["d2t"].add_(200), r"maps to ids 200\.\.398, the vocabulary has 256"),
        (lambda t: t["d2t"].copy_(-torch.arange(100)), "maps 100 draft ids to 1 target ids"),
        (lambda t: t["t2d"][1].fill_(True), "t2d .* keeps 101 ids"),
    ],
)
def test_a_vocabulary_map_that_cannot_be_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    config = make_config(draft_vocab_size=100)
    save_drafter(tmp_path / "out", config, make_tensors(config), layout="speculators")
    change_tensors(tmp_path / "out", change)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "out")


def test_an_unpruned_map_must_change_nothing(tmp_path: Path) -> None:
    folder = copy_checkpoint("speculators_anchor", tmp_path / "drafter")
    change_tensors(folder, lambda t: t.update({"d2t": torch.zeros(256, dtype=torch.int64)}))
    assert load(folder).target_ids is None
    change_tensors(folder, lambda t: t["d2t"].copy_(torch.arange(255, -256, -2)))  # the ids in reverse
    with pytest.raises(CheckpointError, match=r"d2t .* reorders a vocabulary that is not pruned \(256 ids\)"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": [0, 2, 6]}, r"target layer 6, this target has the layers 0\.\.5"),
        ({"num_target_layers": 28}, "a target of 28 layers, this target has 6"),
        ({"mask_token_id": 256}, "mask_token_id .256. is outside the vocabulary of 256 ids"),
    ],
)
def test_a_drafter_of_another_target_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_target_of_another_width_is_refused(tmp_path: Path) -> None:
    config = make_config(target_hidden_size=32)
    save_drafter(tmp_path / "out", config, make_tensors(config), layout="speculators")
    with pytest.raises(CheckpointError, match="hidden size 32, this target has 64"):
        load(tmp_path / "out")


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"256 rows, the target's tokenizer has 257 ids"):
        load(FIXTURES / "deepspec_vanilla", tokenizer_size=257)


def save_with_rows(folder: Path, vocab_size: int) -> None:
    """A drafter whose vocabulary has other padding than the target's 256 rows; its padding has the best logits."""
    config = make_config(vocab_size=vocab_size, draft_vocab_size=vocab_size, mask_token_id=200)
    tensors = make_tensors(config)
    tensors["lm_head.weight"][250:] *= 100.0
    save_drafter(folder, config, tensors, layout="deepspec")


def test_padding_of_the_drafter_is_never_proposed(tmp_path: Path) -> None:
    """Case I1."""
    save_with_rows(tmp_path / "out", 264)
    drafter = load(tmp_path / "out", tokenizer_size=250)
    assert drafter.config.draft_vocab_size == 256
    assert all(token < 256 for token in greedy_tokens(drafter))


def test_padding_of_the_target_can_be_read_and_is_never_proposed(tmp_path: Path) -> None:
    """Case I3."""
    save_with_rows(tmp_path / "out", 250)
    drafter = load(tmp_path / "out", tokenizer_size=250)
    context = PagedContext.of(drafter)
    row = DraftRow(anchor_token_id=255, anchor_position=0, page_ids=[0])
    draft = context.draft([row])
    assert draft.logits.shape == (1, 5, 250)
    assert draft.target_ids.tolist() == draft.draft_ids.tolist()


def test_a_deepspec_drafter_shares_the_embedding_and_head_of_its_target() -> None:
    drafter = load(FIXTURES / "deepspec_vanilla")
    assert drafter._embed == tiny_target().embed_unscaled
    assert drafter._head is tiny_target().head


def test_others_may_read_what_was_saved(tmp_path: Path) -> None:
    config = make_config()
    save_drafter(tmp_path / "drafter", config, make_tensors(config), layout="speculators")
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "drafter" / "model.safetensors", tmp_path / "drafter")]
    assert modes == [0o644, 0o755]
