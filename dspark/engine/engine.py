"""The one loop. A step: schedule, target forward, verify, commit, output, draft. Plain decoding is zero drafts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from dspark.config import EngineConfig
from dspark.engine.compute_thread import ComputeThread
from dspark.engine.drafting import Drafting
from dspark.engine.guard import FaultLimits, Part
from dspark.engine.output import OutputProcessor
from dspark.engine.pace import StepSize
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.prompt_scoring import score_prompts
from dspark.engine.request_check import check_request
from dspark.engine.runner import TargetRunner
from dspark.engine.scheduler import ScheduledRow, Scheduler, verify_all
from dspark.engine.sequence import Sequence, request_seed
from dspark.engine.step_rows import batch_row, sampled_rows, verification_row
from dspark.engine.token_origins import token_origins
from dspark.errors import RequestError
from dspark.metrics import STEP_PHASES, EngineMetrics
from dspark.models.tokenizer import GenerationDefaults, Tokenizer
from dspark.request import FinishReason, Request, RequestOutput
from dspark.speculation.logit_processing import logit_processor
from dspark.speculation.planner import Planner
from dspark.speculation.proposal import NO_DRAFT, Draft, Proposer
from dspark.speculation.structure_matching import StructureCompiler
from dspark.speculation.verification import VerificationResult, verify_batch

logger = logging.getLogger(__name__)

TOKENS_PER_STEP_RATE = 0.05  # of the running mean of what a decoding request gets from a step


class Engine:
    """Serves requests from one thread: `add_request`, `abort` and `step` must not run at the same time.

    `vocab_size` is the target's; every prompt and drafted id stays below it. `proposer` None is plain decoding,
    `planner` None drafts for all and verifies all. Tensors are computed in `compute`'s thread.
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
        planner: Planner | None = None,
        compute: ComputeThread | None = None,
        model_name: str | None = None,
        num_weight_bytes: int = 0,
        fault_limits: FaultLimits | None = None,
    ) -> None:
        self.model_name = model_name or config.model
        self._num_weight_bytes = num_weight_bytes  # that a target pass reads; 0: not known
        self.tokenizer = tokenizer
        self.generation_defaults = generation_defaults
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.metrics = EngineMetrics(self.model_name)
        self.structures = StructureCompiler(
            tokenizer, vocab_size=vocab_size, eos_token_ids=generation_defaults.eos_token_ids
        )
        self.allocator = allocator
        self.runner = runner
        self.compute = compute or ComputeThread()
        self.planner = planner
        self.drafting: Drafting | None = None
        if proposer is not None:
            self.drafting = Drafting(
                proposer,
                compute=self.compute,
                planner=planner,
                allocator=allocator,
                vocab_size=vocab_size,
                speculation=config.speculation,
                metrics=self.metrics,
                limits=fault_limits,
            )
        self.scheduler = self._make_scheduler(config)
        self._config = config
        self._sequences: dict[str, Sequence] = {}
        self._pending_outputs: list[RequestOutput] = []
        self._phase_s: dict[str, float] = {}
        self._tokens_per_step = 1.0  # that a decoding request got lately, on average

    def validate(self, request: Request) -> None:
        """Raise `RequestError` when this model cannot serve the request. Pure; callable from any thread."""
        check_request(
            request,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.generation_defaults.eos_token_ids,
            max_draft_tokens=None if self.drafting is None else self.drafting.proposer.max_draft_tokens,
        )
        if request.sampling.structure is not None:
            self.structures.check(request.sampling.structure)

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
        max_draft_tokens = 0 if self.drafting is None else self.drafting.num_draft_tokens
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
            logit_processor=logit_processor(
                sampling, prompt_token_ids=request.prompt_token_ids, structure=self.structures.matcher_for(sampling)
            ),
            prompt_logprobs=None if sampling.prompt_logprobs is None else [],
        )
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    @property
    def config(self) -> EngineConfig:
        """The settings it was made with."""
        return self._config

    def switch_speculation(self, is_on: bool) -> None:
        """Draft again, or decode plainly until told otherwise; what is decoded is the same."""
        if self.drafting is not None:
            self.drafting.switch(is_on)

    def reset_learned(self) -> None:
        """Forget what was learned online: corrections of confidences, drift of the measured times."""
        if self.drafting is not None:
            self.drafting.reset_learned()
        elif self.planner is not None and self.planner.times is not None:
            self.planner.times.reset_drift()

    @property
    def wait_s(self) -> float:
        """Seconds for which `step` has nothing to do although there are requests, unless more arrive; mostly 0."""
        return 0.0 if self._pending_outputs else self.scheduler.wait_s

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
        rows, results = self._verified(rows)
        if any(row.sequence.num_unscored for row in rows):
            with self._timed("score"):
                self.compute.run(lambda: score_prompts(rows, self.runner))
        judged = list(zip(sampled_rows(rows), results, strict=True))
        num_emitted = [len(result.token_ids) for row, result in judged if row.is_round]
        size = StepSize().plus((r.sequence.num_computed, r.num_tokens + len(r.draft.token_ids)) for r in rows)
        if self.drafting is not None:
            with self._timed("features"):
                self.drafting.take_features(rows, results, self.runner, self._phase_s["forward"])
        with self._timed("output"):
            for row in rows:
                row.sequence.num_computed += row.num_tokens
            for row, result in judged:
                self._commit(row, result)
            for row in rows:
                if row.sequence.page_ids:  # ended sequences registered theirs before giving them back
                    row.sequence.register_pages(self.allocator)
                if row.sequence.num_uncomputed == 0:  # no token was wanted, the prompt was to be scored
                    self._end_early(row.sequence, FinishReason.LENGTH, row.sequence.error)
        if self.drafting is not None:
            with self._timed("draft"):
                decoding = [sequence for sequence in self.scheduler.running if sequence.is_decoding]
                self.drafting.draft(decoding, self.scheduler.coming_load())
        self._learn(size, num_emitted)

    def _verified(self, rows: list[ScheduledRow]) -> tuple[list[ScheduledRow], list[VerificationResult]]:
        """Run the target and judge the drafts; if that fails with drafts, once more without. Returns the rows run."""
        if self.drafting is None or not any(row.draft.token_ids for row in rows):
            return rows, self.compute.run(lambda: self._forward(rows))
        try:
            results = self.compute.run(lambda: self._forward(rows))
        except Exception as error:
            if self._config.speculation.fallback_strategy == "off":
                raise
            logger.exception("a step that verified drafts failed; it is run again without them")
            self.metrics.num_plain_retries.inc()
            self._phase_s["forward"] = self._phase_s["verify"] = 0.0  # times are learned from the pass that worked
            plain = [replace(row, draft=NO_DRAFT) for row in rows]
            results = self.compute.run(lambda: self._forward(plain))
            self.drafting.take_verification(error)  # not before: a target that fails plainly, too, is another matter
            return plain, results
        self.drafting.take_verification(None)
        return rows, results

    def _forward(self, rows: list[ScheduledRow]) -> list[VerificationResult]:
        with self._timed("forward"):
            logits = self.runner.execute([batch_row(row) for row in rows])
        sampled = [verification_row(row) for row in sampled_rows(rows)]
        with self._timed("verify"):
            return verify_batch(logits, sampled) if sampled else []

    def _commit(self, row: ScheduledRow, result: VerificationResult) -> None:
        """Append what verification let through, up to where the request ends, and report it."""
        sequence = row.sequence
        sequence.draft = NO_DRAFT
        error = result.error or sequence.error
        if error is not None:
            self._end_early(sequence, FinishReason.ERROR, error, result.error_param)
            return
        assert 1 <= len(result.token_ids) <= len(row.draft.token_ids) + 1, (result, row.draft.token_ids)
        appended = sequence.take(result.token_ids)
        token_ids = result.token_ids[: appended.num_kept]
        if row.is_round:
            self._count_round(sequence, row.draft, result.num_accepted, len(token_ids))
        self.metrics.generation_tokens.inc(len(token_ids))
        sequence.commit(token_ids)
        sequence.num_computed += min(result.num_accepted, len(token_ids))

        output = sequence.make_output()
        output.text, output.token_ids = appended.text, token_ids
        name = None if self.drafting is None else self.drafting.proposer.name
        output.token_origins = token_origins(row.draft, result.num_accepted, proposer_name=name)[: len(token_ids)]
        output.logprobs = None if result.logprobs is None else result.logprobs[: len(token_ids)]
        output.finish_reason, output.stop_reason = appended.finish_reason, appended.stop_reason
        self._pending_outputs.append(output)
        if sequence.first_token_time is None:
            sequence.first_token_time = time.monotonic()
            self.metrics.observe_first_token(sequence.first_token_time - sequence.request.arrival_time)
        if output.finish_reason is not None:
            sequence.register_pages(self.allocator)
            self._end(sequence, output)

    # -- pace ----------------------------------------------------------------------------------------------

    def _make_scheduler(self, config: EngineConfig) -> Scheduler:
        planner, drafting = self.planner, self.drafting
        return Scheduler(
            config.batching,
            self.allocator,
            plan_lengths=verify_all if planner is None or drafting is None else drafting.plan_lengths,
            step_s=None if planner is None or planner.times is None else self._predicted_step_s,
            tokens_per_step=lambda: self._tokens_per_step,
        )

    def _predicted_step_s(self, num_tokens: int, context_len: float) -> float:
        assert self.planner is not None
        if self.drafting is None:
            return self.planner.step_s(num_tokens, context_len)
        predict = partial(self.planner.step_s, num_tokens, context_len)
        return self.drafting.guard.here(Part.PLAN, predict) or 0.0  # no time at all holds nothing back

    def _learn(self, size: StepSize, num_emitted: list[int]) -> None:
        """Tell the planner and the metrics what this step held and took, and what its rounds gave."""
        if num_emitted:
            mean = sum(num_emitted) / len(num_emitted)
            self._tokens_per_step += TOKENS_PER_STEP_RATE * (mean - self._tokens_per_step)
        phases = self._phase_s
        self.metrics.observe_step(phases, size.num_tokens, self._config.batching.max_batch_tokens)
        if self._num_weight_bytes:
            self.metrics.memory_bandwidth.set(self._num_weight_bytes / phases["forward"])
        planner = self.planner
        if planner is None:
            return
        # Scoring prompts is foreseen by nobody, and says nothing of the steps to come.
        target_s, step_s = phases["forward"] + phases["features"], sum(phases.values()) - phases["score"]

        def observe() -> None:
            if num_emitted and planner.predicted_step_s > 0.0:
                self.metrics.observe_prediction(planner.predicted_step_s, step_s)
            planner.observe_step(
                num_tokens=size.num_tokens,
                context_len=size.context_len,
                target_s=target_s,
                draft_s=phases["draft"],
                num_drafted_for=0 if self.drafting is None else self.drafting.num_joined,
                overhead_s=step_s - target_s - phases["draft"],
            )

        if self.drafting is None:
            observe()
        else:
            self.drafting.guard.here(Part.PLAN, observe)

    # -- ends ----------------------------------------------------------------------------------------------

    def _end_early(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, error_param: str | None = None
    ) -> None:
        if error is not None:
            logger.error("request %s: %s", sequence.request_id, error)
            reason = FinishReason.ERROR
        output = sequence.make_output()
        output.text, output.finish_reason = sequence.output.flush(), reason
        output.error, output.error_param = error, error_param
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
        if self.drafting is not None:
            self.drafting.release(sequence.request_id)

    # -- counting ------------------------------------------------------------------------------------------

    def _count_round(self, sequence: Sequence, draft: Draft, num_accepted: int, num_emitted: int) -> None:
        num_verified = len(draft.token_ids)
        sequence.stats.count_round(num_verified=num_verified, num_accepted=num_accepted, num_emitted=num_emitted)
        if num_verified:
            assert self.drafting is not None, draft
            self.drafting.take_verdict(sequence, draft, num_accepted=num_accepted, num_emitted=num_emitted)

    def _count_admissions(self, rows: list[ScheduledRow]) -> None:
        for sequence in (row.sequence for row in rows):
            if not sequence.was_admitted:
                sequence.was_admitted = True
                sequence.num_cached_tokens = sequence.num_computed
                self.metrics.prompt_tokens.inc(sequence.num_prompt_tokens)
                self.metrics.prefix_cache_queries.inc(sequence.num_prompt_tokens)
                self.metrics.prefix_cache_hits.inc(sequence.num_cached_tokens)

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
