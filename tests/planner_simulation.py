"""A machine on a simulated clock: a planner, requests whose drafts are accepted with known chances, and true times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dspark.speculation.acceptance_rates import DRAFTER_PRIOR
from dspark.speculation.capacity import MeasuredTimes, StepTimes, TimeCurve
from dspark.speculation.planner import Load, Planner
from dspark.speculation.position_rates import PositionRates
from dspark.speculation.prefix_scheduler import survivals_of
from dspark.speculation.proposal import Forecast

# Milliseconds of a small model on two cores: target passes over tokens, drafting passes over requests.
CPU_TARGET = {1: 31, 2: 34, 4: 38, 8: 48, 9: 55, 16: 66, 17: 75, 32: 100, 64: 170, 128: 330}
CPU_DRAFT = {1: 6, 4: 9, 16: 22, 64: 70}
OVERHEAD_S = 0.001
NUM_DRAFT_TOKENS = 7


def curve(milliseconds: dict[int, float]) -> TimeCurve:
    return TimeCurve(tuple(milliseconds), tuple(ms / 1000.0 for ms in milliseconds.values()))


CPU = MeasuredTimes(target=curve(CPU_TARGET), max_tokens=256, draft=curve(CPU_DRAFT))
# An accelerator: tokens are all but free up to a point.
GPU = MeasuredTimes(
    target=curve({1: 10, 64: 10.5, 128: 12, 256: 20, 512: 40}), max_tokens=512, draft=curve({1: 1, 64: 1.5})
)
# Steps by tiles of eight tokens.
TILES = MeasuredTimes(
    target=curve({b: 20 + 10 * ((b - 1) // 8) for k in range(32) for b in (8 * k + 1, 8 * k + 8)}),
    max_tokens=256,
    draft=curve({1: 3, 64: 20}),
)


class Machine:
    """Runs rounds. `acceptance` gives a request's c_1, c_2, .. at a time; the drafter states them as they are."""

    def __init__(
        self,
        times: MeasuredTimes,
        *,
        num_requests: int,
        acceptance: Callable[[str, float], Sequence[float]],
        scheduler: str = "auto",
        seed: int = 0,
        free: Sequence[float] = (),
    ) -> None:
        self.times = times
        self.truth = StepTimes(times)  # the machine itself: never corrected
        self.planner = Planner(
            scheduler=scheduler,
            times=StepTimes(times),
            confidence_threshold=0.5,
            num_draft_tokens=NUM_DRAFT_TOKENS,
        )
        self.request_ids = [f"r{i:03d}" for i in range(num_requests)]
        self.acceptance = acceptance
        self.clock_s = 0.0
        self.tokens = 0.0  # expected ones: chance decides what the planner learns, not what is measured
        self.lengths: dict[str, int] = {}
        self.joined: list[str] = []
        self._free = free
        self._rates = PositionRates(DRAFTER_PRIOR)
        self._round = 0
        self._drafts: dict[str, Sequence[float]] = {}
        self._generator = np.random.default_rng(seed)

    def load(self) -> Load:
        return Load(
            num_decoding=len(self.request_ids),
            num_prefill_tokens=0,
            max_tokens=self.times.max_tokens,
            context_len=0.0,
        )

    def step(self) -> None:
        """Verify what was drafted, then draft."""
        ids, load = self.request_ids, self.load()
        lengths = self.planner.lengths(ids, [self._drafts.get(r) for r in ids], load)
        self.lengths = dict(zip(ids, lengths, strict=True))
        num_tokens = len(ids) + sum(lengths)
        target_s = float(self.truth.target_s(np.array([num_tokens]), 0.0)[0])
        for request_id, length in self.lengths.items():
            self._judge(request_id, length)
        forecasts = [self._forecast(r) for r in ids]
        chosen = self.planner.choose(ids, forecasts, load) if ids else []
        self.joined = [r for r, joins in zip(ids, chosen, strict=True) if joins]
        self._round += 1
        for request_id in self.joined:
            stated = self.acceptance(request_id, self.clock_s)
            self._rates.note_stated(request_id, num_tokens=self._round, confidences=stated)
        self._drafts = {r: self.acceptance(r, self.clock_s) if r in self.joined else self._free for r in ids}
        draft_s = self.truth.draft_s(len(self.joined))
        self.planner.observe_step(
            num_tokens=num_tokens,
            context_len=0.0,
            target_s=target_s,
            draft_s=draft_s,
            num_drafted_for=len(self.joined),
            overhead_s=OVERHEAD_S,
        )
        self.clock_s += target_s + draft_s + OVERHEAD_S

    def run(self, num_steps: int) -> float:
        """Return the tokens per second of so many steps."""
        tokens, clock_s = self.tokens, self.clock_s
        for _ in range(num_steps):
            self.step()
        return (self.tokens - tokens) / (self.clock_s - clock_s)

    def finish(self, request_id: str) -> None:
        self.request_ids.remove(request_id)
        self.planner.release(request_id)
        self._rates.release(request_id)
        self._drafts.pop(request_id, None)

    def _judge(self, request_id: str, length: int) -> None:
        confidences = self._drafts.get(request_id) or ()
        self.tokens += 1.0 + sum(survivals_of(confidences[:length]))
        num_accepted = 0
        while num_accepted < length and self._generator.random() < confidences[num_accepted]:
            num_accepted += 1
        if length:
            self.planner.observe_verdict(request_id, num_accepted)
        if length and request_id in self.joined:
            self._rates.observe(request_id, num_verified=length, num_accepted=num_accepted)

    def _forecast(self, request_id: str) -> Forecast:
        self._rates.settle(request_id, self._round + 1)
        rates = self._rates.confidences(request_id, NUM_DRAFT_TOKENS)
        return Forecast(free=survivals_of(self._free), paid=survivals_of(rates))

    def plain_rate(self) -> float:
        """Tokens per second of decoding without drafts."""
        return self.fixed_rate(0, ())

    def fixed_rate(self, length: int, confidences: Sequence[float]) -> float:
        """Tokens per second if everybody always verified so many tokens, each accepted with these chances."""
        num = len(self.request_ids)
        num_tokens = min(num * (1 + length), self.times.max_tokens)
        share = (num_tokens - num) / (num * length) if length else 0.0
        seconds = float(self.truth.target_s(np.array([num_tokens]), 0.0)[0]) + OVERHEAD_S
        seconds += self.truth.draft_s(num) if length else 0.0
        return num * (1.0 + share * sum(survivals_of(confidences[:length]))) / seconds


def always(confidence: float) -> Callable[[str, float], Sequence[float]]:
    """Every token of every request is accepted with this chance, at all times."""
    return lambda request_id, clock_s: [confidence] * NUM_DRAFT_TOKENS
