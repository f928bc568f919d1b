"""The drafting half of the loop: who drafts, what a faulty drafter may cost (its drafts alone), what is learned.

Nothing here may end or delay a request: errors, bad drafts and calls that hang become rounds without drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from dspark.config import DEFAULT_NUM_DRAFT_TOKENS, SpeculationConfig
from dspark.engine.acceptance_watch import AcceptanceWatch
from dspark.engine.breaker import Breaker, BreakerState
from dspark.engine.compute_thread import ComputeThread
from dspark.engine.draft_check import check_drafts
from dspark.engine.guard import FaultLimits, Guard, Part
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.runner import TargetRunner
from dspark.engine.scheduler import ScheduledRow
from dspark.engine.sequence import Sequence as RequestSequence
from dspark.metrics import EngineMetrics
from dspark.speculation.planner import Load, Planner
from dspark.speculation.prefix_scheduler import survivals_of
from dspark.speculation.proposal import NO_DRAFT, Draft, DraftContext, Forecast, Proposer
from dspark.speculation.structured_drafts import within_structure
from dspark.speculation.verification import VerificationResult

T = TypeVar("T")

ERRORS_SHOWN_EVERY = 64  # rounds


class Drafting:
    """Asks a proposer for drafts and hands it what it learns from, behind a guard.

    `planner` None: every request that can have a draft gets one, all of it verified. With `fallback_strategy` "off" the
    proposer's and the planner's errors are the step's. The planner is used in the engine's thread alone.
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
        limits: FaultLimits | None = None,
    ) -> None:
        self.proposer = proposer
        self.planner = planner
        self.guard = Guard(
            proposer.name,
            compute=compute,
            metrics=metrics,
            falls_back=speculation.fallback_strategy == "auto",
            limits=limits or FaultLimits(),
        )
        self.is_switched_on = True  # by hand; see `Engine.switch_speculation`
        self.num_joined = 0  # requests that the latest drafting pass ran for
        self.num_draft_tokens = num_draft_tokens(speculation, proposer)
        self._allocator = allocator
        self._vocab_size = vocab_size
        self._metrics = metrics
        self._request_breakers: dict[str, Breaker] = {}  # of requests whose drafts were bad
        self._acceptance_watch = AcceptanceWatch()
        self._num_judged = 0  # rounds
        self._declined_before: Counter[str] = Counter()  # of the planner's counts, what the metrics have
        self._probes_before = 0
        self._shown_state = ""

    @property
    def state(self) -> str:
        """What drafting does: "on", "switched_off" by hand, "open" after failures, "probing" when to be tried again."""
        if not self.is_switched_on:
            return "switched_off"
        state = self.guard.state
        return "on" if state is BreakerState.CLOSED else state.value

    def switch(self, is_on: bool) -> None:
        """Draft again, or not until told otherwise; features are still taken, so that it can go on at any time."""
        self.is_switched_on = is_on
        self._show_state()

    def reset_learned(self) -> None:
        """Forget how confidences were corrected and by what measured times are off."""
        self.guard.when_free(self.proposer.reset_calibration)
        if self.planner is not None and self.planner.times is not None:
            self.planner.times.reset_drift()

    # -- in the order of a step ----------------------------------------------------------------------------------

    def plan_lengths(self, decoding: list[RequestSequence], load: Load) -> list[int]:
        """Return how many drafted tokens of each decoding request the step verifies; only with a planner."""
        none = [0] * len(decoding)
        if not self.guard.allows(Part.PLAN):
            return none
        lengths = self.guard.here(Part.PLAN, lambda: self._planned_lengths(decoding, load))
        if lengths is None:
            return none
        drafts = [sequence.draft for sequence in decoding if sequence.draft.token_ids]
        if drafts:
            self.guard.went_well(Part.PLAN)
        for sequence, length in zip(decoding, lengths, strict=True):
            if sequence.draft.confidences:
                self._metrics.observe_plan(length, survivals_of(sequence.draft.confidences))
        return lengths

    def take_verification(self, error: Exception | None) -> None:
        """Count a step that verified drafts; `error` is why it was run again without them."""
        if error is None:
            self.guard.went_well(Part.VERIFICATION)
        else:
            self.guard.failed(Part.VERIFICATION, error)

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
        self.guard.target_s = target_s
        if not self.proposer.tapped_layers:
            return
        results_left = iter(results)
        num_committed = []
        for row in rows:
            result = next(results_left) if row.is_sampled else None
            num_accepted = 0 if result is None else result.num_accepted
            has_failed = result is not None and result.error is not None
            num_committed.append(0 if has_failed else row.num_tokens + num_accepted)

        def take() -> bool:
            self.proposer.take_features(runner.committed_features(num_committed))
            return True

        self.guard.settle()
        # While the breaker is open features are lost: each try could take as long as the one that hung.
        can_try = not self.guard.is_blocked and self.guard.allows(Part.FEATURES)
        if can_try and self.guard.computed(Part.FEATURES, take):
            self.guard.went_well(Part.FEATURES)
            return
        for row in rows:  # the context of these requests has a gap now: no pass for them, and nobody inherits it
            row.sequence.shares_pages = False

    def take_verdict(self, sequence: RequestSequence, draft: Draft, *, num_accepted: int, num_emitted: int) -> None:
        """Count a round that verified a draft, and let the proposer learn from it."""
        name, request_id = draft.proposer_name or self.proposer.name, sequence.request_id
        self._acceptance_watch.observe(name, is_first_accepted=num_accepted > 0)
        self._metrics.observe_round(
            name, num_verified=len(draft.token_ids), num_accepted=num_accepted, num_emitted=num_emitted
        )
        if self.planner is not None:
            planner = self.planner
            self.guard.here(Part.PLAN, lambda: planner.observe_verdict(request_id, num_accepted))
        if self.guard.is_blocked:
            return
        self.guard.here(Part.DRAFTS, lambda: self.proposer.take_verdict(request_id, draft, num_accepted))
        self._num_judged += 1
        if self._num_judged % ERRORS_SHOWN_EVERY == 0:
            self.guard.here(
                Part.DRAFTS, lambda: self._metrics.show_calibration_error(self.proposer.calibration_errors())
            )

    def release(self, request_id: str) -> None:
        """Forget a request that ended or lost its place."""
        self._request_breakers.pop(request_id, None)
        if self.planner is not None:
            planner = self.planner
            self.guard.here(Part.PLAN, lambda: planner.release(request_id))
        self.guard.when_free(lambda: self.proposer.release(request_id))

    def draft(self, sequences: Sequence[RequestSequence], load: Load) -> None:
        """Give those of the decoding requests a draft that may and should have one; `load` is of the coming step.

        No page is taken for a request before it is settled that it gets a draft.
        """
        self.num_joined = 0
        self.guard.settle()
        rests = self.planner is not None and self.planner.rests(len(sequences))
        drafting = [] if rests else self._drafting_for(sequences, load)
        drafts = self._proposed([context for _, context in drafting]) if drafting else []
        for (sequence, context), draft in zip(drafting, drafts, strict=True):
            sequence.draft = within_structure(draft, context)
            sequence.stats.num_drafted += len(draft.token_ids)
            self._metrics.num_drafted.inc(len(draft.token_ids))
        for sequence in sequences:  # of those without a draft, too: what an earlier one needed is still theirs
            sequence.shrink_pages(len(sequence.token_ids) + len(sequence.draft.token_ids), self._allocator)
        self._show_state()

    # -- a round -------------------------------------------------------------------------------------------------

    def _drafting_for(
        self, sequences: Sequence[RequestSequence], load: Load
    ) -> list[tuple[RequestSequence, DraftContext]]:
        """Return who gets a draft, with pages for it, and what the proposer may know of them."""
        wanted = [(s, length) for s in sequences if (length := self._draft_len(s)) > 0]
        num_without_room = len(sequences) - len(wanted)
        reason = self._obstacle()
        if reason is not None:
            self._metrics.count_declined("no_room", num_without_room)
            self._metrics.count_declined(reason, len(wanted))
            return []
        if not self.proposer.has_pass:
            allowed = [(s, length) for s, length in wanted if self._is_trusted(s)]
            self._metrics.count_declined("breaker", len(wanted) - len(allowed))
            wanted = allowed
        contexts = [_draft_context(s, length, joins_pass=self._may_join(s)) for s, length in wanted]
        drafting = []
        chosen = self._chosen(contexts, load) if contexts else []
        for (sequence, _), context in zip(wanted, chosen, strict=True):
            if context is None:
                continue
            if length := self._reserve(sequence, context.num_draft_tokens):
                drafting.append((sequence, replace(context, num_draft_tokens=length)))
            else:
                num_without_room += 1
        kept_out = [c for c, joining in zip(contexts, chosen, strict=True) if joining is None and not c.joins_pass]
        self._metrics.count_declined("breaker", len(kept_out))
        self._metrics.count_declined("no_room", num_without_room)
        return drafting

    def _obstacle(self) -> str | None:
        """Return why nobody gets a draft now, if so."""
        if not self.is_switched_on:
            return "switched_off"
        is_open = self.guard.is_blocked or not self.guard.allows(Part.DRAFTS, Part.PLAN, Part.VERIFICATION)
        return "breaker" if is_open else None

    def _draft_len(self, sequence: RequestSequence) -> int:
        """Return how long a draft may be, as far as its own limits and the pages that are free allow."""
        # A round emits one token more than it verifies, so the last token left needs no draft.
        length = min(sequence.max_draft_tokens, sequence.output.num_tokens_left - 1)
        num_pages = len(sequence.page_ids) + self._allocator.num_available
        return max(0, min(length, num_pages * self._allocator.page_size - len(sequence.token_ids)))

    def _reserve(self, sequence: RequestSequence, length: int) -> int:
        """Own pages for the next draft and return how long it may be; drafts never cost anyone else a page."""
        num_tokens = len(sequence.token_ids)
        if not sequence.grow_pages(num_tokens + length, self._allocator):
            length = len(sequence.page_ids) * self._allocator.page_size - num_tokens
        return max(length, 0)

    def _is_trusted(self, sequence: RequestSequence) -> bool:
        breaker = self._request_breakers.get(sequence.request_id)
        return breaker is None or breaker.allows

    def _may_join(self, sequence: RequestSequence) -> bool:
        if not self.proposer.has_pass:
            return True
        return self.guard.allows(Part.PASS) and sequence.shares_pages and self._is_trusted(sequence)

    def _chosen(self, contexts: list[DraftContext], load: Load) -> list[DraftContext | None]:
        """Decide who joins the pass, before anything is drawn; None for those for whom nothing can be drafted."""
        joins = [context.joins_pass for context in contexts]
        if not self.proposer.has_pass or (self.planner is None and any(joins)):
            return list(contexts)
        forecasts = self._computed(contexts, lambda: self._forecasts(contexts))
        if forecasts is None:
            return [None] * len(contexts)
        if self.planner is not None and any(joins):
            joins = self.guard.here(Part.PLAN, lambda: self._joins(contexts, forecasts, load)) or [False] * len(joins)
            self._count_planned_declines()
        return [
            replace(context, joins_pass=join) if join or len(forecast.free) > 0 else None
            for context, forecast, join in zip(contexts, forecasts, joins, strict=True)
        ]

    def _forecasts(self, contexts: Sequence[DraftContext]) -> list[Forecast]:
        forecasts = _one_each(self.proposer.forecast(contexts), contexts)
        return [  # made anew, so that what is no forecast fails here
            Forecast(free=tuple(forecast.free), paid=tuple(forecast.paid) if context.joins_pass else ())
            for context, forecast in zip(contexts, forecasts, strict=True)
        ]

    def _joins(self, contexts: Sequence[DraftContext], forecasts: list[Forecast], load: Load) -> list[bool]:
        assert self.planner is not None
        return _one_each(self.planner.choose([c.request_id for c in contexts], forecasts, load), contexts)

    def _computed(self, contexts: Sequence[DraftContext], call: Callable[[], T]) -> T | None:
        result = self.guard.computed(self._part(contexts), call)
        if result is None and self.guard.is_blocked:
            # The call goes on, perhaps, with lists that change: what it makes of these requests is worthless, and some
            # will have ended when it is back.
            for context in contexts:
                self.guard.when_free(partial(self.proposer.release, context.request_id))
        return result

    def _part(self, contexts: Sequence[DraftContext]) -> Part:
        has_pass = self.proposer.has_pass and any(context.joins_pass for context in contexts)
        return Part.PASS if has_pass else Part.DRAFTS

    def _proposed(self, contexts: list[DraftContext]) -> list[Draft]:
        """Return a checked draft for each context, NO_DRAFT where there is none or it is faulty."""
        part = self._part(contexts)
        drafts = self._computed(contexts, lambda: _one_each(self.proposer.propose(contexts), contexts))
        if drafts is None:
            return [NO_DRAFT] * len(contexts)
        self.num_joined = sum(context.joins_pass for context in contexts)
        if self.num_joined and self.proposer.num_in_pass is not None:
            self.num_joined = self.proposer.num_in_pass
        checked = [self._checked(draft, context) for draft, context in zip(drafts, contexts, strict=True)]
        if None in checked and not any(draft is not None and draft.token_ids for draft in checked):
            self.guard.failed(part, ValueError("no draft of this round could be used"))
        elif part is Part.PASS:
            self.guard.went_well(Part.PASS, Part.DRAFTS)
        else:
            self.guard.went_well(Part.DRAFTS)
        return [draft or NO_DRAFT for draft in checked]

    def _checked(self, draft: Draft, context: DraftContext) -> Draft | None:
        """Return the draft if verification may see it; else count it against its request alone."""
        breaker = self._request_breakers.get(context.request_id)
        try:
            check_drafts([draft], [context], self._vocab_size)
        except Exception as error:  # whatever a check of nonsense raises
            if not self.guard.falls_back:
                raise
            self.guard.count_failure(error)
            if context.joins_pass:
                breaker = breaker or self._request_breakers.setdefault(context.request_id, self.guard.make_breaker())
                breaker.failed()
            return None
        if breaker is not None and context.joins_pass and draft.token_ids:
            breaker.succeeded()
        return draft

    def _planned_lengths(self, decoding: list[RequestSequence], load: Load) -> list[int]:
        assert self.planner is not None
        lengths = self.planner.lengths([s.request_id for s in decoding], [s.draft.confidences for s in decoding], load)
        num_drafted = [len(s.draft.token_ids) for s in decoding]
        are_prefixes = all(0 <= n <= k for n, k in zip(lengths, num_drafted, strict=True))
        if not are_prefixes or sum(lengths) > load.room:
            raise ValueError(f"planned to verify {lengths} of {num_drafted} drafted tokens, room for {load.room}")
        return lengths

    def _count_planned_declines(self) -> None:
        if self.planner is not None:
            for reason, num in (self.planner.num_declined - self._declined_before).items():
                self._metrics.count_declined(reason, num)
            self._metrics.num_probes.inc(self.planner.num_probes - self._probes_before)
            self._declined_before, self._probes_before = Counter(self.planner.num_declined), self.planner.num_probes

    def _show_state(self) -> None:
        if self.state != self._shown_state:
            self._shown_state = self.state
            self._metrics.show_speculation_state(self.state)


def _one_each(values: Sequence[T], contexts: Sequence[DraftContext]) -> list[T]:
    if len(values) != len(contexts):
        raise ValueError(f"{len(values)} answers for {len(contexts)} requests")
    return list(values)


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
