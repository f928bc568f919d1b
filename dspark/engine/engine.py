"""The one loop. A step: schedule, target forward, verify, commit, output, draft. Plain decoding is zero drafts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dspark.batch import BatchRow
from dspark.config import DEFAULT_NUM_DRAFT_TOKENS, EngineConfig
from dspark.engine.acceptance_watch import AcceptanceWatch
from dspark.engine.draft_check import check_drafts
from dspark.engine.output import OutputProcessor
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.runner import TargetRunner
from dspark.engine.scheduler import ScheduledRow, Scheduler
from dspark.engine.sequence import Sequence, request_seed
from dspark.errors import RequestError
from dspark.metrics import STEP_PHASES, EngineMetrics
from dspark.models.tokenizer import GenerationDefaults, Tokenizer
from dspark.request import FinishReason, Request, RequestOutput
from dspark.speculation.proposal import NO_DRAFT, Draft, DraftContext, Proposer
from dspark.speculation.verification import VerificationResult, VerificationRow, verify_batch

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests from one thread: `add_request`, `abort` and `step` must not run at the same time.

    `vocab_size` is the target's; every prompt and drafted id stays below it. `proposer` None is plain decoding.
    """

    def __init__(
        self,
        *,
        runner: TargetRunner,
        tokenizer: Tokenizer,
        allocator: PageAllocator,
        vocab_size: int,
        max_model_len: int,
        config: EngineConfig,
        generation_defaults: GenerationDefaults,
        proposer: Proposer | None = None,
        model_name: str | None = None,
    ) -> None:
        self.model_name = model_name or config.model
        self.tokenizer = tokenizer
        self.generation_defaults = generation_defaults
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.metrics = EngineMetrics(self.model_name)
        self.allocator = allocator
        self.scheduler = Scheduler(config.batching, allocator)
        self.runner = runner
        self._proposer = proposer
        self._config = config
        self._sequences: dict[str, Sequence] = {}
        self._pending_outputs: list[RequestOutput] = []
        self._phase_s: dict[str, float] = {}
        self._num_drafter_failures = 0
        self._num_draft_tokens = _num_draft_tokens(config, proposer)
        self._acceptance_watch = AcceptanceWatch()

    def validate(self, request: Request) -> None:
        """Raise `RequestError` when this model cannot serve the request. Pure; callable from any thread."""
        prompt = request.prompt_token_ids
        if not len(prompt):
            raise RequestError("prompt is empty; give at least one token", param="prompt")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.max_model_len} and at least one "
                "must be left for the answer; shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        bad_id = next((i for i in prompt if not 0 <= i < self.vocab_size), None)
        if bad_id is not None:
            raise RequestError(
                f"prompt holds token id {bad_id}, but ids of this model are 0 to {self.vocab_size - 1}", param="prompt"
            )
        bad_id = next((i for i in request.sampling.stop_token_ids if i >= self.vocab_size), None)
        if bad_id is not None:
            raise RequestError(
                f"stop_token_ids holds {bad_id}, but ids of this model are 0 to {self.vocab_size - 1}",
                param="stop_token_ids",
            )
        self._validate_draft_length(request.sampling.num_draft_tokens)
        if request.sampling.min_tokens and len(set(request.sampling.stop_token_ids)) >= self.vocab_size:
            raise RequestError(
                f"stop_token_ids holds all {self.vocab_size} ids of this model, so that nothing could come out before "
                f"min_tokens ({request.sampling.min_tokens}); use fewer ids or no min_tokens",
                param="stop_token_ids",
            )
        max_tokens = request.sampling.max_tokens
        if max_tokens is not None and len(prompt) + max_tokens > self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, together more than the context "
                f"of {self.max_model_len}; lower max_tokens, leave it out, or shorten the prompt",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _validate_draft_length(self, num_draft_tokens: int | None) -> None:
        limit = None if self._proposer is None else self._proposer.max_draft_tokens
        if limit is not None and num_draft_tokens is not None and num_draft_tokens > limit:
            raise RequestError(
                f"num_draft_tokens ({num_draft_tokens}) exceeds the drafter's trained length ({limit}); lower it",
                param="num_draft_tokens",
            )

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` when it cannot be served or its id is in use."""
        self.validate(request)
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another", param="request_id")
        sampling, speculation = request.sampling, self._config.speculation
        max_output_tokens = self.max_model_len - len(request.prompt_token_ids)
        if sampling.max_tokens is not None:
            max_output_tokens = sampling.max_tokens
        output = OutputProcessor(
            self.tokenizer,
            sampling,
            eos_token_ids=self.generation_defaults.eos_token_ids,
            max_output_tokens=max_output_tokens,
        )
        max_draft_tokens = self._num_draft_tokens
        if sampling.num_draft_tokens is not None:
            max_draft_tokens = sampling.num_draft_tokens
        sequence = Sequence(
            request=request,
            output=output,
            token_ids=list(request.prompt_token_ids),
            verification="coupled" if sampling.seed is not None else speculation.verification,
            max_draft_tokens=max_draft_tokens,
            masked_token_ids=output.end_token_ids,
            seed=request_seed(request),
        )
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request at once; its last output comes from the next `step`. Unknown ids are harmless."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end_early(sequence, FinishReason.ABORT)

    def has_unfinished(self) -> bool:
        """Return whether `step` has anything to do or to report."""
        return bool(self._sequences or self._pending_outputs)

    def step(self) -> list[RequestOutput]:
        """Run one iteration of the loop and return what it adds to each request."""
        self._phase_s = dict.fromkeys(STEP_PHASES, 0.0)
        with self._timed("schedule"):
            step = self.scheduler.schedule()
            for sequence in step.preempted:
                self._forget_draft_state(sequence)
                self.metrics.num_preemptions.inc()
            self._count_admissions(step.rows)
        if step.rows:
            self._run(step.rows)
            with self._timed("draft"):
                self._draft()
            num_tokens = sum(row.num_tokens + len(row.draft.token_ids) for row in step.rows)
            self.metrics.observe_step(self._phase_s, num_tokens)
        self._update_gauges()
        outputs, self._pending_outputs = self._pending_outputs, []
        return outputs

    def check_integrity(self) -> None:
        """Assert that pages, owners and sequences agree. For tests; costs time."""
        self.allocator.check_integrity(s.page_ids for s in self.scheduler)
        assert {s.request_id for s in self.scheduler} == set(self._sequences)
        for sequence in self.scheduler.running:
            num_tokens = len(sequence.token_ids)
            assert 0 <= sequence.num_computed < num_tokens, (sequence.num_computed, num_tokens)
            assert len(sequence.page_ids) * self.allocator.page_size >= sequence.num_computed

    # -- one step ------------------------------------------------------------------------------------------

    def _run(self, rows: list[ScheduledRow]) -> None:
        sampled = [row for row in rows if row.is_sampled]
        with self._timed("forward"):
            logits = self.runner.execute([_batch_row(row) for row in rows])
        with self._timed("verify"):
            results = verify_batch(logits, [_verification_row(row) for row in sampled]) if sampled else []
        with self._timed("draft"):
            self._hand_over_features(rows, results)
        with self._timed("output"):
            for row in rows:
                row.sequence.num_computed += row.num_tokens
            for row, result in zip(sampled, results, strict=True):
                self._commit(row, result)
            for row in rows:
                if row.sequence.page_ids:  # ended sequences registered theirs before giving them back
                    row.sequence.register_pages(self.allocator)

    def _hand_over_features(self, rows: list[ScheduledRow], results: list[VerificationResult]) -> None:
        """Give the proposer the features of all that this step commits, before anyone can find its pages.

        Of every request, also where it ends now or has no drafts: others may go on from its pages, and it may go on.
        """
        if self._proposer is None or not self._proposer.tapped_layers:
            return
        results_left = iter(results)
        num_committed = []
        for row in rows:
            result = next(results_left) if row.is_sampled else None
            if result is None:
                num_committed.append(row.num_tokens)
            else:
                num_committed.append(0 if result.error is not None else row.num_tokens + result.num_accepted)
        try:
            self._proposer.take_features(self.runner.committed_features(num_committed))
        except Exception:  # the context of these requests has a gap now: no drafts from it, and nobody inherits it
            self._count_drafter_failure(self._proposer.name)
            for row in rows:
                row.sequence.max_draft_tokens, row.sequence.shares_pages = 0, False

    def _commit(self, row: ScheduledRow, result: VerificationResult) -> None:
        """Append what verification let through, up to where the request ends, and report it."""
        sequence = row.sequence
        sequence.draft = NO_DRAFT
        if result.error is not None:
            logger.error("request %s: %s", sequence.request_id, result.error)
            self._end_early(sequence, FinishReason.ERROR, result.error)
            return
        assert 1 <= len(result.token_ids) <= len(row.draft.token_ids) + 1, (result, row.draft.token_ids)
        appended = sequence.output.append(result.token_ids)
        token_ids = result.token_ids[: appended.num_kept]
        if row.is_round:
            self._count_round(sequence, row.draft, result.num_accepted, len(token_ids))
        self.metrics.generation_tokens.inc(len(token_ids))
        sequence.token_ids.extend(token_ids)
        sequence.num_computed += min(result.num_accepted, len(token_ids))

        output = sequence.make_output()
        output.text, output.token_ids = appended.text, token_ids
        output.finish_reason, output.stop_reason = appended.finish_reason, appended.stop_reason
        self._pending_outputs.append(output)
        if sequence.first_token_time is None:
            sequence.first_token_time = time.monotonic()
            self.metrics.ttft_s.observe(sequence.first_token_time - sequence.request.arrival_time)
        if output.finish_reason is not None:
            sequence.register_pages(self.allocator)
            self._end(sequence, output)

    def _draft(self) -> None:
        """Ask the proposer for the next round's drafts of all decoding requests that may have one."""
        if self._proposer is None:
            return
        drafting = [
            (sequence, length)
            for sequence in self.scheduler.running
            if sequence.is_decoding and (length := self._reserve_draft(sequence)) > 0
        ]
        if not drafting:
            return
        contexts = [_draft_context(sequence, length) for sequence, length in drafting]
        try:
            drafts = self._proposer.propose(contexts)
            check_drafts(drafts, contexts, self.vocab_size)
        except Exception:  # a drafter must never cost a request its answer: this round is decoded plainly
            self._count_drafter_failure(self._proposer.name)
            drafts = [NO_DRAFT] * len(drafting)
        for (sequence, _), draft in zip(drafting, drafts, strict=True):
            sequence.draft = draft
            sequence.shrink_pages(len(sequence.token_ids) + len(draft.token_ids), self.allocator)
            sequence.stats.num_drafted += len(draft.token_ids)
            self.metrics.num_drafted.inc(len(draft.token_ids))

    def _reserve_draft(self, sequence: Sequence) -> int:
        """Own pages for the next draft and return how long it may be; drafts never cost anyone else a page."""
        num_tokens = len(sequence.token_ids)
        # A round emits one token more than it verifies, so the last token left needs no draft.
        length = min(sequence.max_draft_tokens, sequence.output.num_tokens_left - 1)
        if length <= 0:
            return 0
        if not sequence.grow_pages(num_tokens + length, self.allocator):
            length = len(sequence.page_ids) * self.allocator.page_size - num_tokens
        return max(length, 0)

    # -- ends ----------------------------------------------------------------------------------------------

    def _end_early(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        output = sequence.make_output()
        output.text, output.finish_reason, output.error = sequence.output.flush(), reason, error
        self._pending_outputs.append(output)
        self._end(sequence, output)

    def _end(self, sequence: Sequence, output: RequestOutput) -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request_id]
        self._forget_draft_state(sequence)
        now = time.monotonic()
        tpot_s = None
        if sequence.first_token_time is not None and sequence.num_output_tokens > 1:
            tpot_s = (now - sequence.first_token_time) / (sequence.num_output_tokens - 1)
        self.metrics.observe_finish(output, e2e_s=now - sequence.request.arrival_time, tpot_s=tpot_s)

    def _forget_draft_state(self, sequence: Sequence) -> None:
        if self._proposer is not None:
            self._proposer.release(sequence.request_id)

    # -- counting ------------------------------------------------------------------------------------------

    def _count_round(self, sequence: Sequence, draft: Draft, num_accepted: int, num_emitted: int) -> None:
        stats, num_verified = sequence.stats, len(draft.token_ids)
        stats.num_rounds += 1
        stats.num_verified += num_verified
        stats.num_accepted += num_accepted
        stats.num_emitted += num_emitted
        if num_verified:
            assert self._proposer is not None, draft
            self._proposer.take_verdict(sequence.request_id, draft, num_accepted)
            name = draft.proposer_name or self._proposer.name
            self._acceptance_watch.observe(name, is_first_accepted=num_accepted > 0)
            self.metrics.observe_round(
                name, num_verified=num_verified, num_accepted=num_accepted, num_emitted=num_emitted
            )

    def _count_admissions(self, rows: list[ScheduledRow]) -> None:
        for sequence in (row.sequence for row in rows):
            if not sequence.was_admitted:
                sequence.was_admitted = True
                sequence.num_cached_tokens = sequence.num_computed
                self.metrics.prompt_tokens.inc(sequence.num_prompt_tokens)
                self.metrics.prefix_cache_queries.inc(sequence.num_prompt_tokens)
                self.metrics.prefix_cache_hits.inc(sequence.num_cached_tokens)

    def _count_drafter_failure(self, name: str) -> None:
        self._num_drafter_failures += 1
        self.metrics.num_drafter_failures.inc()
        if self._num_drafter_failures in (1, 10, 100) or self._num_drafter_failures % 1000 == 0:  # not at every step
            logger.exception(
                "the %s drafter failed (%d times so far); rounds go on without drafts", name, self._num_drafter_failures
            )

    def _update_gauges(self) -> None:
        self.metrics.num_running.set(len(self.scheduler.running))
        self.metrics.num_waiting.set(len(self.scheduler.waiting))
        self.metrics.kv_cache_usage.set(self.allocator.num_used / self.allocator.num_pages)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phase_s[phase] += time.perf_counter() - start


def _num_draft_tokens(config: EngineConfig, proposer: Proposer | None) -> int:
    """Return the draft length of requests that name none: as configured, or the drafter's own."""
    limit = None if proposer is None else proposer.max_draft_tokens
    configured = config.speculation.num_draft_tokens
    assert limit is None or configured is None or configured <= limit, (configured, limit)
    if configured is not None:
        return configured
    return DEFAULT_NUM_DRAFT_TOKENS if limit is None else limit


def _batch_row(row: ScheduledRow) -> BatchRow:
    sequence = row.sequence
    start = sequence.num_computed
    return BatchRow(
        token_ids=sequence.token_ids[start : start + row.num_tokens] + row.draft.token_ids,
        start_position=start,
        page_ids=sequence.page_ids,
        num_logits=1 + len(row.draft.token_ids) if row.is_sampled else 0,
    )


def _verification_row(row: ScheduledRow) -> VerificationRow:
    sequence = row.sequence
    return VerificationRow(
        draft=row.draft,
        sampling=sequence.request.sampling,
        seed=sequence.seed,
        method=sequence.verification,
        anchor_position=len(sequence.token_ids) - 1,
        min_tokens_left=max(0, sequence.request.sampling.min_tokens - sequence.num_output_tokens),
        masked_token_ids=sequence.masked_token_ids,
    )


def _draft_context(sequence: Sequence, num_draft_tokens: int) -> DraftContext:
    return DraftContext(
        request_id=sequence.request_id,
        token_ids=sequence.token_ids,
        sampling=sequence.request.sampling,
        seed=sequence.seed,
        is_coupled=sequence.verification == "coupled",
        num_draft_tokens=num_draft_tokens,
        page_ids=sequence.page_ids,
        page_serials=sequence.page_serials,
    )
