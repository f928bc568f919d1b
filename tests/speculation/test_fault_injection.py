"""The proposer that fails on purpose does what it says, and nothing when no fault is due."""

from __future__ import annotations

import math
import time
from collections import Counter

import pytest
import torch
from toys import FunctionProposer, hashed_rule, soft_proposer

from dspark.request import SamplingParams
from dspark.speculation.fault_injection import FAULTS, Fault, FaultyProposer, InjectedFault, fault_bursts, random_faults
from dspark.speculation.proposal import Draft, DraftContext

VOCAB = 8


def context(temperature: float = 1.0) -> DraftContext:
    return DraftContext(
        request_id="r0",
        token_ids=[1, 2, 3],
        sampling=SamplingParams(temperature=temperature),
        seed=1,
        is_coupled=False,
        num_draft_tokens=3,
        page_ids=[0, 1],
        page_serials=[1, 2],
    )


def failing(fault: Fault | None, call: str = "propose", **waits: float) -> FaultyProposer:
    """Return a proposer in which one kind of call always fails so."""
    inner = soft_proposer(hashed_rule(VOCAB), VOCAB)
    return FaultyProposer(inner, lambda name: fault if name == call else None, **waits)


@pytest.mark.parametrize("call", ["forecast", "propose", "begin"])
def test_raise_raises_before_anything_is_done(call: str) -> None:
    inner = FunctionProposer(lambda c: [1])
    proposer = FaultyProposer(inner, lambda name: "raise")

    with pytest.raises(InjectedFault, match=call):
        getattr(proposer, call)([context()])
    assert inner.lengths == []
    assert proposer.num_faults == Counter({"raise": 1})


def test_nan_spoils_probabilities_and_confidences() -> None:
    (draft,) = failing("nan").propose([context()])

    assert draft.probs is not None and bool(torch.isnan(draft.probs).all())
    assert draft.confidences is not None and [math.isnan(c) for c in draft.confidences] == [True] * 3
    assert all(0 <= token_id < VOCAB for token_id in draft.token_ids)


def test_wrong_ids_spoils_tokens_alone() -> None:
    (draft,) = failing("wrong_ids").propose([context()])

    assert draft.token_ids == [-1, -1, -1]
    assert draft.probs is not None and not bool(torch.isnan(draft.probs).any())


@pytest.mark.parametrize("fault", ["hang", "slow"])
def test_a_call_that_waits_gives_the_right_answer_in_the_end(fault: Fault) -> None:
    start = time.perf_counter()
    drafts = failing(fault, hang_s=0.05, slow_s=0.05).propose([context(0.0)])

    assert time.perf_counter() - start >= 0.05
    assert [d.token_ids for d in drafts] == [d.token_ids for d in failing(None).propose([context(0.0)])]


def test_spoilt_answers_need_a_proposal_and_count_only_there() -> None:
    for fault in ("nan", "wrong_ids"):
        proposer = failing(fault, "forecast")  # type: ignore[arg-type]
        proposer.forecast([context()])
        assert proposer.num_faults == Counter()
        assert proposer.num_calls == Counter({"forecast": 1})


def test_without_faults_it_is_its_inner_proposer() -> None:
    inner = FunctionProposer(lambda c: [1, 2])
    proposer = FaultyProposer(inner, lambda name: None)

    assert proposer.propose([context()]) == [Draft(token_ids=[1, 2])]
    proposer.release("r0")
    assert inner.released == ["r0"]
    assert (proposer.name, proposer.has_pass, proposer.tapped_layers) == ("function", False, ())


def test_random_faults_come_as_often_and_of_such_kinds_as_asked_and_again_with_the_same_seed() -> None:
    faults = [random_faults(0.25, seed=7)("propose") for _ in range(3)]
    assert len(set(faults)) == 1

    next_fault = random_faults(0.25, seed=7)
    drawn = Counter(next_fault("propose") for _ in range(4000))
    assert 900 < 4000 - drawn[None] < 1100
    assert set(drawn) == {None, *FAULTS}
    assert {random_faults(1.0, seed=0, kinds=["nan"])("propose")} == {"nan"}


def test_bursts_come_at_the_end_of_each_period_with_one_kind_after_the_other():
    now = 100.0
    fault = fault_bursts(("raise", "slow"), rate=1.0, seed=0, period_s=10.0, burst_share=0.2, clock=lambda: now)
    seen = []
    for elapsed_s in (0.0, 7.9, 8.1, 9.9, 10.0, 18.1, 28.1):
        now = 100.0 + elapsed_s
        seen.append(fault("propose"))
    assert seen == [None, None, "raise", "raise", None, "slow", "raise"]
