"""The calibration file beside a drafter: read with it, applied to its confidences, refused when it is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from drafter_cases import PagedContext, copy_checkpoint, load

from dspark.errors import CheckpointError
from dspark.models.drafter_attention import DraftRow
from dspark.models.drafter_calibration import load_temperatures
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
    expected = (raw.confidences.logit() / torch.tensor(TEMPERATURES)).sigmoid()
    torch.testing.assert_close(draft.confidences, expected, atol=1e-5, rtol=0)
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
