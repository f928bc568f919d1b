"""The calibration file beside a drafter: read with it, applied to its confidences, refused when it is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from drafter_cases import PagedContext, copy_checkpoint, load
from safetensors import safe_open
from safetensors.torch import load_file

from dspark.errors import CheckpointError
from dspark.models.drafter_attention import DraftRow
from dspark.models.drafter_calibration import (
    ConfidenceHead,
    load_confidence_head,
    load_temperatures,
    replace_confidence_head,
)
from dspark.request import SamplingParams
from dspark.speculation.dspark_drafter import DSparkProposer
from dspark.speculation.proposal import CommittedFeatures, Draft, DraftContext

TEMPERATURES = [2.0, 0.5, 1.0, 4.0, 1.0, 0.25, 3.0]


def round_of(folder: Path) -> tuple[float, Draft]:
    """Return c_1 as stated before the draw, and the greedy draft, after a context of five positions."""
    drafter = load(folder)
    proposer = DSparkProposer(drafter, num_pages=8, page_size=4)
    proposer.take_features(
        CommittedFeatures(
            features=torch.randn((5, drafter.config.feature_size), generator=torch.Generator().manual_seed(2)),
            positions=torch.arange(5),
            slot_mapping=torch.arange(5),
            new_page_ids=torch.tensor([], dtype=torch.int64),
        )
    )
    context = DraftContext(
        request_id="a",
        token_ids=[5, 6, 7, 8, 9, 3],
        sampling=SamplingParams(temperature=0),
        seed=0,
        is_coupled=False,
        num_draft_tokens=7,
        page_ids=range(4),
        page_serials=[1] * 4,
    )
    drafting = proposer.begin([context])
    (first,) = drafting.first_confidences()
    (draft,) = drafting.draft([0])
    return first, draft


def test_confidences_are_calibrated_by_the_file_beside_the_drafter(tmp_path: Path) -> None:
    """The logits are divided by the temperatures; the drafted tokens stay the same."""
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    raw_first, raw = round_of(folder)
    (folder / "sts.json").write_text(json.dumps({"temperatures": TEMPERATURES}))
    first, draft = round_of(folder)
    assert raw.confidences is not None and draft.confidences is not None
    expected = (torch.tensor(raw.confidences).logit() / torch.tensor(TEMPERATURES)).sigmoid()
    torch.testing.assert_close(torch.tensor(draft.confidences), expected, atol=1e-5, rtol=0)
    assert draft.token_ids == raw.token_ids
    assert first == pytest.approx(expected[0].item(), abs=1e-5)
    assert abs(first - raw_first) > 1e-3


def test_without_a_file_confidences_are_the_heads_own(tmp_path: Path) -> None:
    """Bit for bit."""
    drafter = load(copy_checkpoint("deepspec_vanilla", tmp_path / "drafter"))
    context = PagedContext.of(drafter)
    logits = context.draft([DraftRow(anchor_token_id=3, anchor_position=0, page_ids=range(4))]).confidence_logits
    assert logits is not None
    assert torch.equal(drafter.confidences(logits), logits.sigmoid())
    assert load_temperatures(tmp_path / "drafter", num_draft_tokens=7) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"sts\.json cannot be read as JSON"),
        ("\xff\xfe", r"sts\.json cannot be read as JSON"),
        ("[1, 2]", r"temperatures \(None\) in .*sts\.json must be a list of 7 numbers"),
        ('{"temperatures": [1, 1, 1, 1, 1, 1]}', "must be a list of 7 numbers"),
        ('{"temperatures": [1, 1, 1, 1, 1, 1, 0]}', "must be a list of 7 numbers from 0.001 to 1000"),
        ('{"temperatures": [1, 1, 1, 1, 1, 1, NaN]}', "must be a list of 7 numbers"),
        ('{"temperatures": [1, 1, 1, 1, 1, 1, Infinity]}', "must be a list of 7 numbers"),
        ('{"temperatures": [1, 1, 1, 1, 1, 1, "1"]}', "must be a list of 7 numbers"),
        ('{"temperatures": [1, 1, 1, 1, 1, 1, true]}', "must be a list of 7 numbers"),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(content: str, message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    (folder / "sts.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert "calibrate again or remove the file" in str(caught.value)


def test_a_refitted_head_replaces_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    """Bit for bit, in the stored type; metadata and the file's mode stay too."""
    folder = copy_checkpoint("deepspec_vanilla_bf16", tmp_path / "drafter")
    path = folder / "model.safetensors"
    path.chmod(0o640)
    config, before = (folder / "config.json").read_bytes(), load_file(path)
    old = load_confidence_head(folder)
    replace_confidence_head(folder, ConfidenceHead(weights=old.weights * 0.5, bias=old.bias - 1.25))
    after = load_file(path)
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    for name in changed:
        assert (after[name].dtype, after[name].shape) == (torch.bfloat16, before[name].shape)
    new = load_confidence_head(folder)
    assert new.weights == pytest.approx(old.weights * 0.5)
    assert new.bias == pytest.approx(old.bias - 1.25, abs=0.01)
    assert (folder / "config.json").read_bytes() == config
    assert path.stat().st_mode & 0o777 == 0o640
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(one.name for one in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_serving_reads_the_refitted_head(tmp_path: Path) -> None:
    """Half the logit minus 1, for the weights and the bias were changed so; the drafted tokens stay the same."""
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    _, raw = round_of(folder)
    old = load_confidence_head(folder)
    replace_confidence_head(folder, ConfidenceHead(weights=old.weights / 2, bias=old.bias / 2 - 1))
    _, draft = round_of(folder)
    assert raw.confidences is not None and draft.confidences is not None
    expected = (torch.tensor(raw.confidences).logit() / 2 - 1).sigmoid()
    torch.testing.assert_close(torch.tensor(draft.confidences), expected, atol=1e-5, rtol=0)
    assert draft.token_ids == raw.token_ids


def test_a_head_that_the_stored_type_cannot_hold_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    before = (folder / "model.safetensors").read_bytes()
    old = load_confidence_head(folder)
    with pytest.raises(CheckpointError, match=r"confidence_head\.proj\.bias \(up to 1e\+300\) is beyond what"):
        replace_confidence_head(folder, ConfidenceHead(weights=old.weights, bias=1e300))
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError("No space left on device")

    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    before = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr("dspark.models.drafter_calibration.sync", full)
    with pytest.raises(CheckpointError, match="cannot be replaced: No space left on device; free space"):
        replace_confidence_head(folder, load_confidence_head(folder))
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(one.name for one in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_head_in_a_shard_is_replaced_there(tmp_path: Path) -> None:
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    shard = folder / "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(shard)
    homes = dict.fromkeys(load_file(shard), shard.name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": homes}))
    old = load_confidence_head(folder)
    replace_confidence_head(folder, ConfidenceHead(weights=old.weights, bias=-3.0))
    assert float(load_file(shard)["confidence_head.proj.bias"]) == -3
    index.write_text(json.dumps({"weight_map": homes | {"confidence_head.proj.bias": "other.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"is spread over .*, other\.safetensors; export the drafter"):
        replace_confidence_head(folder, old)
