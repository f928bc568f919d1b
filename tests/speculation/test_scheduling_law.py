"""The exact law of what comes out when confidences, which look at drawn tokens, choose the verified lengths.

Every draft, coin and drawn token is enumerated. A scheduler that looks ahead shows that these tests can fail.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from enumerated_draws import Rows, completed, joint, outcomes

from dspark.request import SamplingParams
from dspark.speculation.capacity import MeasuredTimes, StepTimes, TimeCurve
from dspark.speculation.planner import SCHEDULERS, Load, Planner
from dspark.speculation.prefix_scheduler import (
    DelayedScheduler,
    DraftedStep,
    EarlyStopScheduler,
    FixedScheduler,
    ForesightScheduler,
    PrefixScheduler,
    ThresholdScheduler,
    survivals_of,
    throughput,
)
from dspark.speculation.proposal import Draft, Forecast
from dspark.speculation.sampling import race
from dspark.speculation.verification import VerificationRow, verify_batch

FIXTURE = Path(__file__).parents[1] / "fixtures" / "algorithms" / "appendix_a_counterexample.json"
APPENDIX_A = json.loads(FIXTURE.read_text())
DRAFT_LEN = 2


class AnticipatingScheduler:
    """What no scheduler may do: the best of all lengths by the present confidences, which looks past a drop."""

    def lengths(self, step: DraftedStep) -> list[int]:
        room = step.max_drafted
        allowed = (n for n in itertools.product(*(range(len(a) + 1) for a in step.survivals)) if sum(n) <= room)
        return list(max(allowed, key=lambda lengths: throughput(step, lengths)))


class PrimedDelayedScheduler:
    """The delayed scheduler two steps after one with drafts of the survivals it is made with."""

    def __init__(self, earlier: Sequence[Sequence[float]]) -> None:
        self._earlier = earlier

    def lengths(self, step: DraftedStep) -> list[int]:
        scheduler = DelayedScheduler()
        for survivals in (self._earlier, [[0.5] for _ in self._earlier]):
            scheduler.lengths(
                DraftedStep(
                    survivals=survivals,
                    num_other_tokens=step.num_other_tokens,
                    max_tokens=step.max_tokens,
                    step_s=step.step_s,
                )
            )
        return scheduler.lengths(step)


@dataclass(frozen=True)
class Toy:
    """A request: laws by the tokens since the anchor, and the chance that the next drafted token is accepted."""

    target: Rows
    draft: Rows

    def confidence(self, prefix: tuple[int, ...]) -> float:
        """Return c of the token after `prefix`: 1 - l1 / 2 (Eq. 8), which looks at the tokens drawn before it."""
        return float(np.minimum(self.target(prefix), self.draft(prefix)).sum())

    def survivals(self, drafted: tuple[int, ...]) -> list[float]:
        return survivals_of(self.confidence(drafted[:k]) for k in range(len(drafted)))

    def row(self, drafted: tuple[int, ...], length: int, method: str) -> tuple[torch.Tensor, VerificationRow]:
        """Return the target's logits and the row that verifies the first `length` drafted tokens."""
        with np.errstate(divide="ignore"):
            logits = np.log(np.stack([self.target(drafted[:k]) for k in range(length + 1)]))
        probs = np.stack([self.draft(drafted[:k]) for k in range(length)]) if length else None
        draft = Draft(
            token_ids=list(drafted[:length]),
            probs=None if probs is None else torch.tensor(probs, dtype=torch.float32),
        )
        row = VerificationRow(draft=draft, sampling=SamplingParams(), seed=0, method=method, anchor_position=0)
        return torch.tensor(logits, dtype=torch.float32), row


def output_law(toys: Sequence[Toy], lengths_of: Callable[[list[list[float]]], list[int]], method: str) -> np.ndarray:
    """Return the joint law of DRAFT_LEN + 1 tokens of each request after one round, one axis per request."""
    num_tokens = DRAFT_LEN + 1

    @cache
    def law_of(r: int, drafted: tuple[int, ...], length: int) -> np.ndarray:
        emitted: dict[tuple[int, ...], float] = defaultdict(float)

        def verify(draws):  # type: ignore[no-untyped-def]
            logits, row = toys[r].row(drafted, length, method)
            return verify_batch(logits, [row], draws=draws)[0]

        for probability, num_accepted, last in outcomes(verify):
            for token_id, p in enumerate(last):
                emitted[(*drafted[:num_accepted], token_id)] += probability * p
        return completed(dict(emitted), toys[r].target, length=num_tokens).ravel()

    vocab_size = len(toys[0].target(()))
    drafts = list(itertools.product(range(vocab_size), repeat=DRAFT_LEN))
    law = np.zeros([vocab_size**num_tokens] * len(toys))
    for drafted in itertools.product(drafts, repeat=len(toys)):
        draws = [toy.draft(x[:k])[x[k]] for toy, x in zip(toys, drafted, strict=True) for k in range(DRAFT_LEN)]
        probability = float(np.prod(draws))
        if probability == 0.0:
            continue
        lengths = lengths_of([toy.survivals(x) for toy, x in zip(toys, drafted, strict=True)])
        parts = [law_of(r, x[:length], length) for r, (x, length) in enumerate(zip(drafted, lengths, strict=True))]
        law += probability * (parts[0] if len(parts) == 1 else np.multiply.outer(*parts))
    return law


# -- the paper's counter-example (case B12) ------------------------------------------------------------------------


def appendix_toy() -> Toy:
    """p = (.7, .3), q = (.5, .5), so c_1 = .8; c_2 = .9 after an A and 0 after a B."""
    even = np.array([0.5, 0.5])
    targets = {(): np.array(APPENDIX_A["target_first"]), (0,): np.array([0.6, 0.4]), (1,): np.array([1.0, 0.0])}
    drafts = {(): np.array(APPENDIX_A["draft_first"]), (0,): even, (1,): np.array([0.0, 1.0])}
    return Toy(lambda prefix: targets.get(prefix, even), lambda prefix: drafts.get(prefix, even))


def appendix_step(survivals: list[list[float]]) -> DraftedStep:
    sps = np.array([0.0, *APPENDIX_A["sps"][1:]])
    return DraftedStep(survivals=survivals, num_other_tokens=1, max_tokens=3, step_s=lambda b: 1.0 / sps[b])


APPENDIX_SCHEDULERS: dict[str, PrefixScheduler] = {
    "early_stop": EarlyStopScheduler(),
    "foresight": ForesightScheduler(),
    "delayed": PrimedDelayedScheduler([[0.99, 0.98]]),
    "threshold": ThresholdScheduler(0.5),
    "fixed": FixedScheduler(2),
}


def probability_of_a(scheduler: PrefixScheduler, method: str) -> float:
    law = output_law([appendix_toy()], lambda a: scheduler.lengths(appendix_step(a)), method)
    return float(law[: len(law) // 2].sum())


def test_the_counter_example_is_the_papers():
    toy = appendix_toy()
    for case, drafted in (("x1_is_A", (0, 0)), ("x1_is_B", (1, 1))):
        published = APPENDIX_A["cases"][case]
        survivals = toy.survivals(drafted)
        assert survivals == pytest.approx(published["a"])
        assert EarlyStopScheduler().lengths(appendix_step([survivals])) == [published["length_algorithm1"]]
        assert AnticipatingScheduler().lengths(appendix_step([survivals])) == [published["length_without_break"]]


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_searching_past_a_drop_gives_085_instead_of_070(method):
    assert probability_of_a(AnticipatingScheduler(), method) == pytest.approx(0.85, abs=1e-6)


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("name", APPENDIX_SCHEDULERS)
def test_every_scheduler_keeps_070(name, method):
    assert probability_of_a(APPENDIX_SCHEDULERS[name], method) == pytest.approx(0.70, abs=1e-6)


# -- coupled: the target's own draw comes out, whatever was looked at ----------------------------------------------


class RacingDraws:
    """Runs every race of a two-token vocabulary with given clocks, for the drafter and the target alike."""

    def __init__(self, uniforms: Sequence[float]) -> None:
        self._uniforms = uniforms  # by position after the anchor: e_A / (e_A + e_B), uniform for exponential clocks

    def race_token(self, row: VerificationRow | None, position: int, probs: torch.Tensor) -> int:
        u = self._uniforms[position - 1]
        return race(probs, np.array([u / (1.0 - u), 1.0], dtype=np.float32))

    def is_accepted(self, row, position, probability):
        raise AssertionError("coupled verification flips no coin")

    def pick_tokens(self, picks, weights):
        raise AssertionError("coupled verification picks nothing")


def cells(toy: Toy, position: int) -> Iterator[tuple[float, float]]:
    """Yield (clock, probability): one clock of each interval in which all races at a position end alike."""
    prefixes = list(itertools.product(range(2), repeat=position - 1))
    bounds = sorted({0.0, 1.0, *(float(rows(x)[0]) for rows in (toy.target, toy.draft) for x in prefixes)})
    yield from (((low + high) / 2, high - low) for low, high in itertools.pairwise(bounds))


def coupled_law(toy: Toy, scheduler: PrefixScheduler) -> np.ndarray:
    """Return the joint law of DRAFT_LEN + 1 tokens under coupled drafting and verification."""
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    for chosen in itertools.product(*(cells(toy, position) for position in range(1, DRAFT_LEN + 2))):
        draws = RacingDraws([clock for clock, _ in chosen])
        drafted: tuple[int, ...] = ()
        for position in range(1, DRAFT_LEN + 1):
            q = torch.tensor(toy.draft(drafted), dtype=torch.float32)
            drafted = (*drafted, draws.race_token(None, position, q))
        [length] = scheduler.lengths(appendix_step([toy.survivals(drafted)]))
        logits, row = toy.row(drafted, length, "coupled")
        result = verify_batch(logits, [row], draws=draws)[0]
        emitted[tuple(result.token_ids)] += float(np.prod([probability for _, probability in chosen]))
    return completed(dict(emitted), toy.target, length=DRAFT_LEN + 1)


@pytest.mark.parametrize("scheduler", [AnticipatingScheduler(), EarlyStopScheduler()], ids=lambda s: type(s).__name__)
def test_coupled_verification_keeps_070_even_where_the_scheduler_looks_ahead(scheduler):
    toy = appendix_toy()
    law = coupled_law(toy, scheduler)
    assert law.sum(axis=(1, 2)) == pytest.approx([0.70, 0.30], abs=1e-6)
    assert np.abs(law - joint(toy.target, (), length=DRAFT_LEN + 1)).max() < 1e-6


# -- two requests that compete for the budget ----------------------------------------------------------------------


def toy_of(start: tuple[list[float], list[float]], shares: Sequence[float], seed: int) -> Toy:
    """Return laws over three tokens, of target and draft: `start`, then by the last token, overlapping by `shares`."""
    generator = np.random.default_rng(seed)
    after_p, after_q = [], []
    for share in shares:
        common = generator.dirichlet(np.ones(3))
        after_p.append(share * common + (1.0 - share) * np.array([1.0, 0.0, 0.0]))
        after_q.append(share * common + (1.0 - share) * np.array([0.0, 0.5, 0.5]))
    p, q = (np.array([*after, first]) for after, first in zip((after_p, after_q), start, strict=True))
    return Toy(*(lambda prefix, rows=rows: rows[prefix[-1] if prefix else 3] for rows in (p, q)))


# c_1 is .8 and .7; c_2 is high after some tokens and low after others.
TOYS = (
    toy_of(([0.5, 0.3, 0.2], [0.3, 0.5, 0.2]), [0.95, 0.5, 0.1], seed=0),
    toy_of(([0.2, 0.2, 0.6], [0.5, 0.2, 0.3]), [0.2, 0.9, 0.7], seed=1),
)
COMPETING = {
    "early_stop": EarlyStopScheduler(),
    "foresight": ForesightScheduler(),
    "delayed": PrimedDelayedScheduler([[0.99, 0.98], [0.9, 0.2]]),
    "threshold": ThresholdScheduler(0.4),
    "fixed": FixedScheduler(2),
}


def competing_step(survivals: list[list[float]]) -> DraftedStep:
    """Return a step with room for three drafted tokens of four, over costs that make a second token dear."""
    seconds = np.array([0.0, 1.0, 1.0, 1.1, 1.44, 1.55, 9.0])
    return DraftedStep(survivals=survivals, num_other_tokens=2, max_tokens=5, step_s=lambda b: seconds[b], fixed_s=0.2)


def competing_deviation(scheduler: PrefixScheduler, method: str) -> tuple[float, set[tuple[int, ...]]]:
    """Return how far the law is from that of two independent targets, and the lengths that were chosen."""
    seen: set[tuple[int, ...]] = set()

    def lengths_of(survivals: list[list[float]]) -> list[int]:
        lengths = scheduler.lengths(competing_step(survivals))
        seen.add(tuple(lengths))
        return lengths

    law = output_law(TOYS, lengths_of, method)
    expected = np.multiply.outer(*(joint(toy.target, (), length=DRAFT_LEN + 1).ravel() for toy in TOYS))
    return float(np.abs(law - expected).max()), seen


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("name", COMPETING)
def test_requests_that_compete_for_the_budget_keep_their_joint_law(name, method):
    deviation, seen = competing_deviation(COMPETING[name], method)
    assert deviation < 1e-6
    assert len(seen) > 1 or name == "fixed"  # the drawn tokens did decide


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_looking_ahead_breaks_the_joint_law_of_competing_requests(method):
    deviation, seen = competing_deviation(AnticipatingScheduler(), method)
    assert deviation > 1e-3
    assert len(seen) > 1


# -- the planner, with all it does besides -------------------------------------------------------------------------


class PlannedRound:
    """A planner as a `PrefixScheduler`: before each law's round it lived through others."""

    def __init__(
        self, name: str, seconds: Sequence[float], *, first_size: int, earlier: Sequence[Sequence[float]]
    ) -> None:
        self._name = name
        self._curve = TimeCurve(tuple(range(first_size, first_size + len(seconds))), tuple(seconds))
        self._earlier = earlier

    def planner(self, load: Load) -> Planner:
        """Return a planner two rounds old, whose measured times are all that a step costs."""
        times = StepTimes(MeasuredTimes(target=self._curve, max_tokens=64))
        planner = Planner(scheduler=self._name, times=times, confidence_threshold=0.4, num_draft_tokens=DRAFT_LEN)
        ids = [str(r) for r in range(len(self._earlier))]
        for confidences in (self._earlier, [[0.5] for _ in self._earlier]):
            planner.lengths(ids, confidences, load)
        return planner

    def lengths(self, step: DraftedStep) -> list[int]:
        num_requests = len(step.survivals)
        load = Load(num_decoding=num_requests, num_prefill_tokens=0, max_tokens=step.max_tokens, context_len=0.0)
        return self.planner(load).lengths([str(r) for r in range(num_requests)], confidences_of(step), load)


class ProbedRound(PlannedRound):
    """The same where the last request was declined until now and is probed in this round."""

    def planner(self, load: Load) -> Planner:
        planner = super().planner(load)
        ids = [str(r) for r in range(load.num_decoding)]
        forecasts = [*[Forecast(paid=[0.99, 0.98])] * (len(ids) - 1), Forecast(paid=[0.01])]
        for _ in range(40):
            planner.observe_step(
                num_tokens=2, context_len=0.0, target_s=1.2, draft_s=0.0, num_drafted_for=0, overhead_s=0.0
            )
            if planner.choose(ids, forecasts, load)[-1]:
                return planner
        raise AssertionError("no probe")


def confidences_of(step: DraftedStep) -> list[list[float]]:
    return [[b / a if a else 0.0 for a, b in zip([1.0, *row], row, strict=False)] for row in step.survivals]


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_planner_keeps_070(name, method):
    seconds = [1.0 / sps for sps in APPENDIX_A["sps"][1:]]
    planned = PlannedRound(name, seconds, first_size=1, earlier=[[0.99, 0.98]])
    assert probability_of_a(planned, method) == pytest.approx(0.70, abs=1e-6)


@pytest.mark.parametrize("round_type", [PlannedRound, ProbedRound])
@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_planned_requests_that_compete_for_the_budget_keep_their_joint_law(name, method, round_type):
    if round_type is ProbedRound and name in ("threshold", "fixed"):
        pytest.skip("they decline nobody")
    planned = round_type(name, [1.2, 1.3, 1.64, 1.75, 9.2], first_size=2, earlier=[[0.99, 0.98], [0.9, 0.2]])
    deviation, seen = competing_deviation(planned, method)
    assert deviation < 1e-6
    assert len(seen) > 1 or name == "fixed"
    assert round_type is PlannedRound or all(lengths[-1] >= 1 for lengths in seen)
