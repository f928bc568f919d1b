"""The drafting half of the loop: who drafts, what a faulty drafter may cost (its drafts alone), what is learned.

Nothing here may end or delay a request: errors, bad drafts and calls that hang become rounds without drafts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from dspark.config import DEFAULT_NUM_DRAFT_TOKENS, SpeculationConfig
from dspark.engine.acceptance_watch import AcceptanceWatch
from dspark.engine.breaker import Breaker, BreakerState
from dspark.engine.compute_thread import ComputeThread, ComputeTimeout
from dspark.engine.draft_check import check_drafts
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.runner import TargetRunner
from dspark.engine.scheduler import ScheduledRow
from dspark.engine.sequence import Sequence as RequestSequence
from dspark.metrics import EngineMetrics
from dspark.speculation.planner import Load, Planner
from dspark.speculation.prefix_scheduler import survivals_of
from dspark.speculation.proposal import NO_DRAFT, Draft, DraftContext, Proposer
from dspark.speculation.verification import VerificationResult

logger = logging.getLogger(__name__)

T = TypeVar("T")

ERRORS_SHOWN_EVERY = 64  # rounds
# A drafting pass that takes longer than so many target passes is too slow to be of use, and past the second limit it is
# taken to hang; small models get some time in any case, for a busy machine delays anybody by that.
SLOW_PASSES, SLOW_AT_LEAST_S = 4.0, 0.5
HANGING_PASSES, HANGING_AT_LEAST_S = 20.0, 2.0


class Drafting:
    """Asks a proposer for drafts and hands it what it learns from, behind a breaker.

    `planner` None: every request that can have a draft gets one, all of it verified. With `fallback_strategy` "off" the
    proposer's errors are the step's.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        compute: ComputeThread,
        planner: Planner | None,
        allocator: PageAllocator,
        vocab_size: int,
        speculation: SpeculationConfig,
        metrics: EngineMetrics,
    ) -> None:
        self.proposer = proposer
        self.planner = planner
        self.breaker = Breaker()
        self.is_switched_on = True  # by hand; see `Engine.switch_speculation`
        self.num_joined = 0  # requests that the latest drafting pass ran for
        self.num_draft_tokens = num_draft_tokens(speculation, proposer)
        self._compute = compute
        self._allocator = allocator
        self._vocab_size = vocab_size
        self._falls_back = speculation.fallback_strategy == "auto"
        self._metrics = metrics
        self._request_breakers: dict[str, Breaker] = {}  # of requests whose drafts were bad
        self._acceptance_watch = AcceptanceWatch()
        self._unreleased: list[str] = []  # requests that ended while a call was left behind
        self._num_judged = 0  # rounds
        self._declined_before: Counter[str] = Counter()  # of the planner's counts, what the metrics have
        self._probes_before = 0
        self._num_failures = 0
        self._target_s = 0.0  # of the latest target pass

    @property
    def state(self) -> str:
        """What drafting does: "on", "switched_off" by hand, "open" after failures, "probing" when to be tried again."""
        if not self.is_switched_on:
            return "switched_off"
        return "on" if self.breaker.state is BreakerState.CLOSED else self.breaker.state.value

    def switch(self, is_on: bool) -> None:
        """Draft again, or not until told otherwise; features are still taken, so that it can go on at any time."""
        self.is_switched_on = is_on
        self._metrics.show_speculation_state(self.state)

    # -- in the order of a step ----------------------------------------------------------------------------------

    def take_features(
        self,
        rows: Sequence[ScheduledRow],
        results: Sequence[VerificationResult],
        runner: TargetRunner,
        target_s: float,
    ) -> None:
        """Give the proposer the features of all that this step commits, before anyone can find its pages.

        Of every request, also where it ends now or has no drafts: others may go on from its pages, and it may go on.
        `results` are of the sampled rows, in order; `target_s` is what the pass took.
        """
        self._target_s = target_s
        if not self.proposer.tapped_layers:
            return
        results_left = iter(results)
        num_committed = []
        for row in rows:
            result = next(results_left) if row.is_sampled else None
            num_accepted = 0 if result is None else result.num_accepted
            has_failed = result is not None and result.error is not None
            num_committed.append(0 if has_failed else row.num_tokens + num_accepted)
        if self.breaker.is_blocked or not self._succeeds(
            lambda: self.proposer.take_features(runner.committed_features(num_committed))
        ):
            for row in rows:  # the context of these requests has a gap now: no pass for them, and nobody inherits it
                row.sequence.shares_pages = False

    def draft(self, sequences: Sequence[RequestSequence], load: Load) -> None:
        """Give those of the decoding requests a draft that may and should have one; `load` is of the coming step."""
        self.num_joined = 0
        lengths = [self._reserve(sequence) for sequence in sequences]
        drafting = [(s, length) for s, length in zip(sequences, lengths, strict=True) if length > 0]
        self._metrics.count_declined("no_room", len(sequences) - len(drafting))
        if not drafting:
            return
        can_try = self.breaker.allows if not self.proposer.has_pass else not self.breaker.is_blocked
        if not (self.is_switched_on and can_try):
            self._metrics.count_declined("breaker" if self.is_switched_on else "switched_off", len(drafting))
            drafts = [NO_DRAFT] * len(drafting)
        else:
            contexts = [_draft_context(s, length, joins_pass=self._may_join(s)) for s, length in drafting]
            drafts = self._proposed(contexts, load)
        for (sequence, _), draft in zip(drafting, drafts, strict=True):
            sequence.draft = draft
            sequence.shrink_pages(len(sequence.token_ids) + len(draft.token_ids), self._allocator)
            sequence.stats.num_drafted += len(draft.token_ids)
            self._metrics.num_drafted.inc(len(draft.token_ids))

    def plan_lengths(self, decoding: list[RequestSequence], load: Load) -> list[int]:
        """Return how many drafted tokens of each decoding request the step verifies; only with a planner."""
        assert self.planner is not None
        planner, confidences = self.planner, [s.draft.confidences for s in decoding]
        try:
            lengths = planner.lengths([s.request_id for s in decoding], confidences, load)
        except Exception as error:  # a planner must cost no more than a drafter may
            if not self._falls_back:
                raise
            self._failed(error)
            return [0] * len(decoding)
        for confidence, length in zip(confidences, lengths, strict=True):
            if confidence:
                self._metrics.observe_plan(length, survivals_of(confidence))
        return lengths

    def take_verdict(self, sequence: RequestSequence, draft: Draft, *, num_accepted: int, num_emitted: int) -> None:
        """Count a round that verified a draft, and let the proposer learn from it."""
        name = draft.proposer_name or self.proposer.name
        self._acceptance_watch.observe(name, is_first_accepted=num_accepted > 0)
        self._metrics.observe_round(
            name, num_verified=len(draft.token_ids), num_accepted=num_accepted, num_emitted=num_emitted
        )
        if self.planner is not None:
            self.planner.observe_verdict(sequence.request_id, num_accepted)
        if not self.breaker.is_blocked:
            self._caught(lambda: self.proposer.take_verdict(sequence.request_id, draft, num_accepted))
        self._num_judged += 1
        if self._num_judged % ERRORS_SHOWN_EVERY == 0:
            self._metrics.show_calibration_error(self.proposer.calibration_errors())

    def release(self, request_id: str) -> None:
        """Forget a request that ended or lost its place."""
        self._request_breakers.pop(request_id, None)
        if self.planner is not None:
            self.planner.release(request_id)
        if self.breaker.is_blocked:
            self._unreleased.append(request_id)
            return
        for late_id in (*self._unreleased, request_id):
            self._caught(partial(self.proposer.release, late_id))
        self._unreleased.clear()

    # -- a round -------------------------------------------------------------------------------------------------

    def _reserve(self, sequence: RequestSequence) -> int:
        """Own pages for the next draft and return how long it may be; drafts never cost anyone else a page."""
        num_tokens = len(sequence.token_ids)
        # A round emits one token more than it verifies, so the last token left needs no draft.
        length = min(sequence.max_draft_tokens, sequence.output.num_tokens_left - 1)
        if length <= 0:
            return 0
        if not sequence.grow_pages(num_tokens + length, self._allocator):
            length = len(sequence.page_ids) * self._allocator.page_size - num_tokens
        return max(length, 0)

    def _may_join(self, sequence: RequestSequence) -> bool:
        breaker = self._request_breakers.get(sequence.request_id)
        return self.breaker.allows and sequence.shares_pages and (breaker is None or breaker.allows)

    def _proposed(self, contexts: list[DraftContext], load: Load) -> list[Draft]:
        """Return a checked draft for each context, NO_DRAFT where there is none or it is faulty."""
        start = time.perf_counter()
        answer = self._guarded(lambda: self._propose(contexts, load))
        seconds = time.perf_counter() - start
        if answer is None:
            return [NO_DRAFT] * len(contexts)
        joined, drafts = answer
        self._count_planned_declines()
        self.num_joined = sum(joined)
        if len(drafts) != len(contexts):
            self._failed(ValueError(f"{len(drafts)} drafts for {len(contexts)} requests"))
            return [NO_DRAFT] * len(contexts)
        checked = [self._checked(draft, context) for draft, context in zip(drafts, contexts, strict=True)]
        has_drafts = any(draft.token_ids for draft in drafts)
        if has_drafts and not any(draft.token_ids for draft in checked):
            self._failed(ValueError("no draft of this round could be used"))
        elif seconds > self._limit_s(SLOW_PASSES, SLOW_AT_LEAST_S):
            self._failed(ComputeTimeout(seconds))
        elif self.num_joined or not self.proposer.has_pass:
            self._went_well()
        return checked

    def _propose(self, contexts: list[DraftContext], load: Load) -> tuple[list[bool], list[Draft]]:
        """Decide who joins the pass, before anything is drawn, and draft. Returns both, for each context."""
        joins = [context.joins_pass for context in contexts]
        if self.planner is not None and self.proposer.has_pass and any(joins):
            forecasts = [
                forecast if may_join else replace(forecast, paid=())
                for forecast, may_join in zip(self.proposer.forecast(contexts), joins, strict=True)
            ]
            joins = self.planner.choose([c.request_id for c in contexts], forecasts, load)
            contexts = [replace(c, joins_pass=join) for c, join in zip(contexts, joins, strict=True)]
        return joins, self.proposer.propose(contexts)

    def _count_planned_declines(self) -> None:
        if self.planner is not None:
            for reason, num in (self.planner.num_declined - self._declined_before).items():
                self._metrics.count_declined(reason, num)
            self._metrics.num_probes.inc(self.planner.num_probes - self._probes_before)
            self._declined_before, self._probes_before = Counter(self.planner.num_declined), self.planner.num_probes

    def _checked(self, draft: Draft, context: DraftContext) -> Draft:
        """Return the draft if verification may see it; else count it against its request alone."""
        try:
            check_drafts([draft], [context], self._vocab_size)
        except ValueError as error:
            if not self._falls_back:
                raise
            self._count_failure(error)
            self._request_breakers.setdefault(context.request_id, Breaker()).failed()
            return NO_DRAFT
        if draft.token_ids and context.request_id in self._request_breakers:
            self._request_breakers[context.request_id].succeeded()
        return draft

    # -- faults --------------------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """Return what `call` returns in the compute thread, or None if it failed or did not come back."""
        if not self._falls_back:
            return self._compute.run(call)
        try:
            return self._compute.run(call, timeout_s=self._limit_s(HANGING_PASSES, HANGING_AT_LEAST_S))
        except ComputeTimeout as error:
            self._failed(error)
        except Exception as error:  # a drafter must never cost a request its answer
            self._failed(error)
        return None

    def _succeeds(self, call: Callable[[], None]) -> bool:
        """Run a call that returns nothing; False if it failed."""

        def call_and_tell() -> bool:
            call()
            return True

        return self._guarded(call_and_tell) is not None

    def _caught(self, call: Callable[[], None]) -> None:
        """Make a call that computes nothing, in this thread: there is one for each request and round."""
        try:
            call()
        except Exception as error:
            if not self._falls_back:
                raise
            self._failed(error)

    def _limit_s(self, num_passes: float, at_least_s: float) -> float:
        return max(at_least_s, num_passes * self._target_s)

    def _failed(self, error: Exception) -> None:
        self._count_failure(error)
        left_behind = error.call if isinstance(error, ComputeTimeout) else None
        if self.breaker.failed(left_behind):
            self._metrics.count_breaker("open")
            logger.warning("drafting by %s is switched off for a while: %s", self.proposer.name, error)
        self._metrics.show_speculation_state(self.state)

    def _went_well(self) -> None:
        if self.breaker.succeeded():
            self._metrics.count_breaker("closed")
            logger.warning("drafting by %s works again", self.proposer.name)
        self._metrics.show_speculation_state(self.state)

    def _count_failure(self, error: Exception) -> None:
        self._num_failures += 1
        self._metrics.num_drafter_failures.inc()
        if self._num_failures in (1, 10, 100) or self._num_failures % 1000 == 0:  # not at every step
            logger.error(
                "the %s drafter failed (%d times so far); rounds go on without drafts",
                self.proposer.name,
                self._num_failures,
                exc_info=error,
            )


def num_draft_tokens(speculation: SpeculationConfig, proposer: Proposer) -> int:
    """Return the draft length of requests that name none: as configured, or the drafter's own."""
    limit, configured = proposer.max_draft_tokens, speculation.num_draft_tokens
    assert limit is None or configured is None or configured <= limit, (configured, limit)
    if configured is not None:
        return configured
    return DEFAULT_NUM_DRAFT_TOKENS if limit is None else limit


def _draft_context(sequence: RequestSequence, num_draft_tokens: int, *, joins_pass: bool) -> DraftContext:
    return DraftContext(
        request_id=sequence.request_id,
        token_ids=sequence.token_ids,
        sampling=sequence.request.sampling,
        seed=sequence.seed,
        is_coupled=sequence.verification == "coupled",
        num_draft_tokens=num_draft_tokens,
        page_ids=sequence.page_ids,
        page_serials=sequence.page_serials,
        logit_processor=sequence.logit_processor,
        joins_pass=joins_pass,
    )
