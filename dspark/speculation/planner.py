"""Decides each step what is drafted and how much of it is verified, so that no step is slower than plain decoding.

Before drafting it chooses who joins the drafting pass, by forecasts; when drafts are there, the verified lengths, by
their confidences. Both maximise expected tokens over the seconds of the whole step. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dspark.speculation.joining import Joining, PassCosts, best_joining
from dspark.speculation.prefix_scheduler import (
    DelayedScheduler,
    DraftedStep,
    EarlyStopScheduler,
    FixedScheduler,
    ForesightScheduler,
    PrefixScheduler,
    SurvivalTable,
    ThresholdScheduler,
    throughput,
)
from dspark.speculation.probing import Probes
from dspark.speculation.resting import Resting

if TYPE_CHECKING:
    from dspark.speculation.capacity import StepTimes
    from dspark.speculation.proposal import Forecast

SCHEDULERS = ("auto", "early_stop", "delayed", "threshold", "fixed")
TIMED_SCHEDULERS = ("auto", "early_stop", "delayed")  # weigh tokens against measured times, and may decline to draft
MIN_GAIN = 1.02  # of Theta before drafting begins again; it ends at a gain of nothing, so that it does not flap
MEAN_RATE = 1 / 32  # of the running means of the engine's overhead and of passes that were not measured
MAX_STALL = 4.0  # an overhead counts for so many times the mean at most: a stall is not what a step costs


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a step holds besides drafts."""

    num_decoding: int  # requests that decode: each computes one token and gets one
    num_prefill_tokens: int
    max_tokens: int  # token budget of the step
    context_len: float  # mean tokens before a token of the step

    def __post_init__(self) -> None:
        assert self.num_prefill_tokens >= 0 and self.num_decoding >= 0, self

    @property
    def num_tokens(self) -> int:
        """Tokens of the step without drafts, and what it brings forward without them.

        A prefilled token counts as much as one that comes out: time spent on drafts holds up both.
        """
        return self.num_decoding + self.num_prefill_tokens

    @property
    def room(self) -> int:
        """Drafted tokens that the budget has room for."""
        return max(0, self.max_tokens - self.num_tokens)


class Planner:
    """Plans the rounds of one engine: `choose`, a drafting pass, `lengths`, the target's pass, and what both took.

    `threshold` and `fixed` never decline: who names them wants what they say. `times` may be None for them alone.
    """

    def __init__(
        self, *, scheduler: str, times: StepTimes | None, confidence_threshold: float, num_draft_tokens: int
    ) -> None:
        assert scheduler in SCHEDULERS, (scheduler, SCHEDULERS)
        assert times is not None or scheduler not in TIMED_SCHEDULERS, f"{scheduler} needs measured step times"
        self.times = times
        self.overhead_s = 0.0  # running mean of what a step takes besides both passes
        self.num_declined: Counter[str] = Counter()  # requests without a pass by reason, one for each round
        self.num_probes = 0  # requests that joined a pass only to see whether drafting pays again
        self._may_decline = scheduler in TIMED_SCHEDULERS
        self._scheduler = _scheduler(scheduler, confidence_threshold, num_draft_tokens)
        self._is_drafting = True  # whether the last round found drafting worth it for anybody
        self._num_joined = 0  # requests of the latest pass
        self._num_probed = 0  # of these
        self._pass_s = 0.0  # running mean of passes, where none were measured
        self._probes = Probes()
        self._resting = Resting()
        self._is_resting = True  # until the first round
        self._planned: tuple[int, float] = (0, 0.0)  # tokens of the latest step and their mean context

    def rests(self, num_requests: int) -> bool:
        """Return whether this round goes without drafts and without looking for any; call it first in each round."""
        self._is_resting = self._may_decline and self._resting.rests(num_requests)
        if self._is_resting:
            self.num_declined["resting"] += num_requests
        return self._is_resting

    # -- before drafting -----------------------------------------------------------------------------------------

    def choose(self, request_ids: Sequence[str], forecasts: Sequence[Forecast], load: Load) -> list[bool]:
        """Return who joins this round's drafting pass; nobody: there is none.

        Looks at forecasts alone, so it biases nothing. Call it once a round, right before drafting, with the requests
        that could have a draft; `load` is that of the step which verifies the drafts.
        """
        assert len(request_ids) == len(forecasts) <= load.num_decoding, (len(forecasts), load)
        self._num_probed = 0
        can_join = [len(forecast.paid) > 0 for forecast in forecasts]
        if not self._may_decline or not any(can_join):
            self._num_joined = sum(can_join)
            return can_join
        if load.room == 0:
            self._num_joined = 0
            self.num_declined["no_room"] += sum(can_join)
            return [False] * len(forecasts)
        joining = best_joining(request_ids, forecasts, self._pass_costs(load))
        self._is_drafting = joining.theta > joining.plain_theta * (1.0 if self._is_drafting else MIN_GAIN)
        joins = [False] * len(forecasts)
        for i in joining.order if self._is_drafting else ():
            joins[i] = True
            self._probes.forget(request_ids[i])
        self._num_joined = sum(joins)
        declined = [r for r, can, does in zip(request_ids, can_join, joins, strict=True) if can and not does]
        probed = self._probe(declined, joining, load) if declined else set()
        return [does or r in probed for r, does in zip(request_ids, joins, strict=True)]

    def _pass_costs(self, load: Load) -> PassCosts:
        return PassCosts(
            num_tokens_out=load.num_tokens,
            num_other_tokens=load.num_tokens,
            room=load.room,
            target_s=lambda num_tokens: self._target_s(num_tokens, load.context_len),
            draft_s=self._drafts_s,
            fixed_s=self.overhead_s,
        )

    def _probe(self, declined: list[str], joining: Joining, load: Load) -> set[str]:
        """Let a few of the declined requests join anyway, if it is time; return them."""
        num_joined = self._num_joined
        num_planned = joining.num_tokens if self._is_drafting else joining.plain_num_tokens
        theta = joining.theta if self._is_drafting else joining.plain_theta

        def cost_s(num_requests: int, num_tokens: int) -> float:
            before, after = self._target_s(num_planned + np.array([0, num_tokens]), load.context_len)
            return float(after - before) + self._draft_s(num_joined + num_requests) - self._draft_s(num_joined)

        due = self._probes.due(declined)
        probed = self._probes.start(due, cost_s=cost_s, saved_s=1.0 / theta) if due else []
        self.num_declined["not_worth_it"] += len(declined) - len(probed)
        self.num_probes += len(probed)
        self._num_probed = len(probed)
        self._num_joined += len(probed)
        return set(probed)

    # -- before verification -------------------------------------------------------------------------------------

    def lengths(
        self, request_ids: Sequence[str], confidences: Sequence[Sequence[float] | None], load: Load
    ) -> list[int]:
        """Return how many drafted tokens of each decoding request the step verifies.

        `confidences` are c_1 .. c_k of the drafts that wait, None or empty where there is none. Call it once for every
        step in which requests decode. Drafts never take a request's own token, nor prefill's.
        """
        assert len(request_ids) == len(confidences) <= load.num_decoding, (len(request_ids), load)
        # In the order of their ids: equal survivals then go to the same request wherever it stands.
        order = sorted(range(len(request_ids)), key=request_ids.__getitem__)
        drafts = [confidences[i] or () for i in order]
        self._planned = (load.num_tokens, load.context_len)
        if not any(drafts) and not isinstance(self._scheduler, DelayedScheduler):  # that one counts steps
            self._note_gain(load, 0.0)
            return [0] * len(order)
        forced = self._forced_lengths([request_ids[i] for i in order], drafts, load.room)
        drafts += [()] * (load.num_tokens - len(order))
        survivals: Sequence[Sequence[float]] = SurvivalTable.rounded(drafts)
        num_forced = sum(forced)
        if num_forced:  # to be verified in any case, as the requests' own tokens are
            forced += [0] * (len(drafts) - len(forced))
            survivals = [a[length:] for a, length in zip(survivals, forced, strict=True)]
        step = DraftedStep(
            survivals=survivals,
            num_other_tokens=load.num_tokens + num_forced,
            max_tokens=load.max_tokens,
            step_s=lambda num_tokens: self._target_s(num_tokens, load.context_len),
            # Passes for probes are charged to the probes: they would make every token look cheap.
            fixed_s=self._draft_s(max(0, self._num_joined - self._num_probed)) + self.overhead_s,
        )
        chosen = self._scheduler.lengths(step)
        lengths = [0] * len(request_ids)
        for i, length, more in zip(order, forced, chosen, strict=False):
            lengths[i] = length + more
        self._planned = (load.num_tokens + sum(lengths), load.context_len)
        self._note_gain(load, throughput(step, chosen))
        return lengths

    def _note_gain(self, load: Load, planned: float) -> None:
        """Tell what the planned tokens per second gain over plain decoding; 0: nothing is to be verified."""
        if self._is_resting or not self._may_decline:
            return
        plain_s = float(self._target_s(np.array([load.num_tokens]), load.context_len)[0]) + self.overhead_s
        gain = max(0.0, planned * plain_s / load.num_tokens - 1.0)
        self._resting.observe(gain, load.num_decoding, plain_s)

    def _forced_lengths(self, request_ids: Sequence[str], drafts: Sequence[Sequence[float]], room: int) -> list[int]:
        """Return how many tokens of each draft are verified to learn from, as was settled before it was drawn."""
        forced = [0] * len(request_ids)
        if not self._probes.is_any_on_the_way:
            return forced
        for i, (request_id, draft) in enumerate(zip(request_ids, drafts, strict=True)):
            forced[i] = min(self._probes.length(request_id), len(draft), room)
            room -= forced[i]
        return forced

    # -- what came of it -----------------------------------------------------------------------------------------

    def observe_verdict(self, request_id: str, num_accepted: int) -> None:
        """Take how many tokens of a request's verified draft were accepted."""
        self._probes.observe_verdict(request_id, num_accepted)

    def observe_step(
        self,
        *,
        num_tokens: int,  # of the target's pass, at least 1
        context_len: float,
        target_s: float,
        draft_s: float,
        num_drafted_for: int,  # requests that joined the drafting pass that `draft_s` was spent on
        overhead_s: float,  # all else that the step took
    ) -> None:
        """Learn from the timings of a step in production, at its end."""
        self._num_joined = num_drafted_for
        self._probes.pass_time(target_s + draft_s + overhead_s)
        if self.overhead_s > 0.0:
            overhead_s = min(overhead_s, MAX_STALL * self.overhead_s)
            self.overhead_s += MEAN_RATE * (overhead_s - self.overhead_s)
        else:
            self.overhead_s = overhead_s
        if self.times is None:
            return
        if target_s > 0.0:
            self.times.observe_target(num_tokens, context_len, target_s)
        if num_drafted_for and draft_s > 0.0:
            if self.times.has_draft_times:
                self.times.observe_draft(num_drafted_for, draft_s)
            else:
                self._pass_s += (MEAN_RATE if self._pass_s else 1.0) * (draft_s - self._pass_s)

    def release(self, request_id: str) -> None:
        """Forget a request that ended or lost its place; unknown ids are harmless."""
        self._probes.forget(request_id)

    def step_s(self, num_tokens: int, context_len: float) -> float:
        """Predict the seconds of a step of so many tokens, with a drafting pass like the latest; only with times."""
        target_s = float(self._target_s(np.array([num_tokens]), context_len)[0])
        return target_s + self._draft_s(self._num_joined) + self.overhead_s

    @property
    def predicted_target_s(self) -> float:
        """Seconds that the target's pass of the step planned last was expected to take; 0 without measured times."""
        num_tokens, context_len = self._planned
        return float(self._target_s(np.array([num_tokens]), context_len)[0]) if self.times is not None else 0.0

    @property
    def predicted_step_s(self) -> float:
        """Seconds that the step planned last was expected to take in all; 0 without measured times."""
        if self.times is None:
            return 0.0
        return self.predicted_target_s + self._draft_s(self._num_joined) + self.overhead_s

    def _target_s(self, num_tokens: np.ndarray, context_len: float) -> np.ndarray:
        # Without times no scheduler that is left asks what tokens cost.
        return np.ones(len(num_tokens)) if self.times is None else self.times.target_s(num_tokens, context_len)

    def _draft_s(self, num_requests: int) -> float:
        return float(self._drafts_s(np.array([num_requests]))[0]) if num_requests else 0.0

    def _drafts_s(self, num_requests: np.ndarray) -> np.ndarray:
        if self.times is not None and self.times.has_draft_times:
            return self.times.drafts_s(num_requests)
        return np.where(num_requests > 0, self._pass_s, 0.0)


def _scheduler(name: str, confidence_threshold: float, num_draft_tokens: int) -> PrefixScheduler:
    if name == "auto":
        return ForesightScheduler()
    if name == "early_stop":
        return EarlyStopScheduler()
    if name == "delayed":
        return DelayedScheduler()
    if name == "threshold":
        return ThresholdScheduler(confidence_threshold)
    return FixedScheduler(num_draft_tokens)
