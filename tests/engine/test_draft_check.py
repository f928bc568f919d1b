"""What the engine refuses of a proposer: lengths, ids, vectors and confidences that scheduling must not see."""

from __future__ import annotations

import pytest
import torch

from dspark.engine.draft_check import check_drafts
from dspark.request import SamplingParams
from dspark.speculation.proposal import NO_DRAFT, Draft, DraftContext

VOCAB = 4


def context(request_id: str = "a") -> DraftContext:
    return DraftContext(
        request_id=request_id, token_ids=[1], sampling=SamplingParams(), seed=0, is_coupled=False, num_draft_tokens=3,
        page_ids=(), page_serials=(),
    )  # fmt: skip


def check(*drafts: Draft) -> None:
    check_drafts(drafts, [context("abc"[i]) for i in range(len(drafts))], VOCAB)


def test_whole_drafts_pass():
    certain = Draft(token_ids=[0, 1], probs=torch.eye(4)[:2], confidences=[0.0, 1.0])
    check(NO_DRAFT, Draft(token_ids=[0, 3, 2]), certain)


@pytest.mark.parametrize("bad", [float("nan"), -1e-9, 1.0 + 1e-9, float("inf")])
def test_a_confidence_that_is_no_probability_is_an_error_naming_request_and_value(bad):
    """Case J10."""
    with pytest.raises(ValueError, match=rf"request b: confidence 2 is {bad}"):
        check(NO_DRAFT, Draft(token_ids=[0, 1, 2], confidences=[0.5, bad, 0.5]))


@pytest.mark.parametrize("confidences", [[], [0.5], [0.5] * 3])
def test_there_is_one_confidence_for_each_token(confidences):
    with pytest.raises(ValueError, match=rf"request a: {len(confidences)} confidences for 2 tokens"):
        check(Draft(token_ids=[0, 1], confidences=confidences))


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft(token_ids=[0, 1, 2, 3]), "4 tokens drafted, 3 allowed"),
        (Draft(token_ids=[4]), "leave the vocabulary"),
        (Draft(token_ids=[-1]), "leave the vocabulary"),
        (Draft(token_ids=[0], probs=torch.eye(4)[:2]), "probs are"),
        (Draft(token_ids=[0], probs=torch.eye(4, dtype=torch.float64)[:1]), "probs are"),
        (Draft(token_ids=[1], probs=torch.eye(4)[:1]), "have probabilities"),
        (Draft(token_ids=[0], probs=torch.full((1, 4), torch.nan)), "have probabilities"),
    ],
)
def test_what_cannot_be_verified_is_an_error(draft, message):
    with pytest.raises(ValueError, match=message):
        check(draft)


def test_a_missing_draft_is_an_error():
    with pytest.raises(ValueError, match="0 drafts for 1 requests"):
        check_drafts([], [context()], VOCAB)
