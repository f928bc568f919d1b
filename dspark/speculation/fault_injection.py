"""A proposer that fails on purpose, to show what a faulty drafter costs. For tests and soak runs."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from dspark.speculation.proposal import (
    CommittedFeatures,
    Draft,
    DraftContext,
    DraftRound,
    Forecast,
    Proposer,
)

Fault = Literal["raise", "hang", "slow", "nan", "wrong_ids"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
SPOILING: tuple[Fault, ...] = ("nan", "wrong_ids")  # faults of what a call returns
NextFault = Callable[[str], Fault | None]  # name of the call that is about to be made -> what goes wrong in it


class InjectedFault(RuntimeError):
    """What a call with the fault "raise" raises."""


class FaultyProposer(Proposer):
    """Passes calls on to `inner`, but for those where `next_fault` names a fault.

    "raise" raises before anything is done, "hang" and "slow" wait for so many seconds first, "nan" makes confidences
    and probabilities of all drafts NaN, "wrong_ids" makes their tokens negative. The last two need a `propose`; in
    other calls they do nothing and are not counted.
    """

    def __init__(self, inner: Proposer, next_fault: NextFault, *, hang_s: float = 60.0, slow_s: float = 1.0) -> None:
        self.name = inner.name
        self.max_draft_tokens = inner.max_draft_tokens
        self.tapped_layers = inner.tapped_layers
        self.has_confidences = inner.has_confidences
        self.has_pass = inner.has_pass
        self.num_calls: Counter[str] = Counter()  # of those that may fail, by name
        self.num_faults: Counter[Fault] = Counter()
        self._inner = inner
        self._next_fault = next_fault
        self._wait_s: dict[Fault, float] = {"hang": hang_s, "slow": slow_s}

    def take_features(self, committed: CommittedFeatures) -> None:
        """See `Proposer`."""
        self._begin("take_features")
        self._inner.take_features(committed)

    def forecast(self, contexts: Sequence[DraftContext]) -> list[Forecast]:
        """See `Proposer`."""
        self._begin("forecast")
        return self._inner.forecast(contexts)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """See `Proposer`."""
        fault = self._begin("propose")
        drafts = self._inner.propose(contexts)
        self.num_in_pass = self._inner.num_in_pass
        return [_spoilt(draft, fault) for draft in drafts]

    def begin(self, contexts: Sequence[DraftContext]) -> DraftRound:
        """See `Proposer`."""
        self._begin("begin")
        return self._inner.begin(contexts)

    def take_verdict(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """See `Proposer`; never faulty, for it computes nothing."""
        self._inner.take_verdict(request_id, draft, num_accepted)

    def release(self, request_id: str) -> None:
        """See `Proposer`; never faulty."""
        self._inner.release(request_id)

    def calibration_errors(self) -> Sequence[float | None]:
        """See `Proposer`."""
        return self._inner.calibration_errors()

    def reset_calibration(self) -> None:
        """See `Proposer`."""
        self._inner.reset_calibration()

    def export_state(self) -> dict[str, Any]:
        """See `Proposer`."""
        return self._inner.export_state()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """See `Proposer`."""
        self._inner.restore_state(state)

    def _begin(self, call: str) -> Fault | None:
        self.num_calls[call] += 1
        fault = self._next_fault(call)
        if fault is None or (fault in SPOILING and call != "propose"):
            return None
        self.num_faults[fault] += 1
        if fault == "raise":
            raise InjectedFault(f"injected fault in {call}")
        time.sleep(self._wait_s.get(fault, 0.0))
        return fault


def random_faults(rate: float, seed: int, kinds: Collection[Fault] = FAULTS) -> NextFault:
    """Return a `NextFault` that lets a share `rate` of all calls fail, in one of these ways."""
    assert 0.0 <= rate <= 1.0 and kinds, (rate, kinds)
    generator, choices = random.Random(seed), sorted(kinds)
    return lambda _: generator.choice(choices) if generator.random() < rate else None


def fault_bursts(
    kinds: Sequence[Fault],
    *,
    rate: float,
    seed: int,
    period_s: float,
    burst_share: float,
    clock: Callable[[], float] = time.monotonic,
) -> NextFault:
    """Return a `NextFault` that fails a share `rate` of the calls in the last `burst_share` of each period, else none.

    In the first period, which begins now, calls fail in the first of `kinds`, in the next one in the second, and so on
    round and round: a time of as many periods as there are kinds holds the same whenever it starts.
    """
    assert 0.0 < burst_share <= 1.0 and period_s > 0.0 and kinds, (burst_share, period_s, kinds)
    start = clock()
    of_kind = [random_faults(rate, seed + number, (kind,)) for number, kind in enumerate(kinds)]

    def next_fault(call: str) -> Fault | None:
        number, share = divmod((clock() - start) / period_s, 1.0)
        return of_kind[int(number) % len(of_kind)](call) if share >= 1.0 - burst_share else None

    return next_fault


def _spoilt(draft: Draft, fault: Fault | None) -> Draft:
    if fault == "wrong_ids":
        return replace(draft, token_ids=[-1 for _ in draft.token_ids])
    if fault == "nan":
        nan = float("nan")
        probs = None if draft.probs is None else draft.probs * nan
        return replace(draft, probs=probs, confidences=[nan for _ in draft.token_ids])
    return draft
