"""Counters and histograms of one engine as Prometheus metrics: our `dspark:*` names beside those graphed for vLLM."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from dspark.request import FinishReason, RequestOutput

LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
LENGTH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
RATIO_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
ERROR_BUCKETS = (0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
DRAFT_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
SPECULATION_STATES = ("on", "switched_off", "open", "probing")
MAX_RECENT = 512  # latencies kept one by one, for percentiles
# Benchmarks that add up every line of a counter's name would take its creation time for a count.
disable_created_metrics()

M = TypeVar("M", bound=MetricWrapperBase)

STEP_PHASES = ("schedule", "forward", "verify", "score", "features", "output", "draft")


# Our names for what is kept under vLLM's, so that everything is found under one prefix too.
OWN_NAMES = {
    "vllm:num_requests_running": "dspark:requests_running",
    "vllm:num_requests_waiting": "dspark:requests_waiting",
    "vllm:request_success": "dspark:requests",
    "vllm:kv_cache_usage_perc": "dspark:kv_cache_usage_ratio",
    "vllm:prefix_cache_queries": "dspark:prefix_cache_queries",
    "vllm:prefix_cache_hits": "dspark:prefix_cache_hits",
    "vllm:num_preemptions": "dspark:preemptions",
    "vllm:prompt_tokens": "dspark:prompt_tokens",
    "vllm:generation_tokens": "dspark:generation_tokens",
    "vllm:time_to_first_token_seconds": "dspark:time_to_first_token_seconds",
    "vllm:e2e_request_latency_seconds": "dspark:e2e_request_latency_seconds",
    "vllm:request_time_per_output_token_seconds": "dspark:time_per_output_token_seconds",
    "vllm:spec_decode_num_drafts": "dspark:verification_rounds",
    "vllm:spec_decode_num_draft_tokens": "dspark:verified_tokens",
    "vllm:spec_decode_num_accepted_tokens": "dspark:accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "dspark:accepted_tokens_per_pos",
}


class _OwnNames(Collector):
    """Shows metrics of a registry once more under the names of `OWN_NAMES`; nothing is counted twice."""

    def __init__(self, sources: Sequence[Collector]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Return the renamed metrics with their present values."""
        for metric in (m for source in self._sources for m in source.collect()):
            own = Metric(OWN_NAMES[metric.name], metric.documentation, metric.type)
            own.samples = [s._replace(name=own.name + s.name.removeprefix(metric.name)) for s in metric.samples]
            yield own


class EngineMetrics:
    """All metrics of one engine in a registry of their own, so that several engines can live in one process."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._sources: list[Collector] = []  # what `OWN_NAMES` renames

        self.num_running = self._gauge("vllm:num_requests_running", "Requests in the batch.")
        self.num_waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for a place.")
        self.kv_cache_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use (1 is full).")
        self._add_latencies()
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens emitted.")
        self.prefix_cache_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self.prefix_cache_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found.")
        self.num_preemptions = self._counter("vllm:num_preemptions", "Requests sent back to the queue for pages.")

        self.num_rounds = self._counter("vllm:spec_decode_num_drafts", "Verification rounds with a draft.")
        self.num_verified = self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens checked.")
        self.num_accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._accepted_per_position = self._labelled(
            Counter,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by position in the block.",
            "position",
        )
        self._rounds_per_proposer = self._labelled(
            Counter, "dspark:verification_rounds_per_proposer", "Rounds with a draft, by whose it was.", "proposer"
        )
        self._verified_per_proposer = self._labelled(
            Counter, "dspark:verified_tokens_per_proposer", "Drafted tokens checked, by proposer.", "proposer"
        )
        self._accepted_per_proposer = self._labelled(
            Counter, "dspark:accepted_tokens_per_proposer", "Drafted tokens accepted, by proposer.", "proposer"
        )
        self.num_drafted = self._counter("dspark:drafted_tokens", "Tokens proposed, verified or not.")
        self.num_drafter_failures = self._counter("dspark:drafter_failures", "Drafting passes that raised.")
        self.num_emitted = self._counter("dspark:round_emitted_tokens", "Tokens emitted by rounds with a draft.")
        self._verified_per_position = self._labelled(
            Counter, "dspark:verified_tokens_per_pos", "Drafted tokens checked, by position in the block.", "position"
        )
        self._step_s = self._labelled(
            Counter, "dspark:step_seconds", "Seconds spent in engine steps, by phase.", "phase"
        )
        self.num_steps = self._counter("dspark:steps", "Engine steps.")
        self.batch_tokens = self._histogram("dspark:batch_tokens", "Tokens per target pass.", LENGTH_BUCKETS)
        self.batch_utilisation = self._histogram(
            "dspark:batch_utilisation_ratio", "Tokens of a target pass per token budget.", RATIO_BUCKETS
        )
        self._add_scheduling()
        self._requests = self._labelled(
            Counter, "vllm:request_success", "Requests ended, by reason.", "finished_reason"
        )
        for reason in FinishReason:  # export zeros from the start, so that rates are right
            self._requests.labels(model_name, reason.value)
        self.registry.register(_OwnNames(self._sources))
        ProcessCollector(registry=self.registry)  # memory, processor time and open files, where there is /proc

    def _add_latencies(self) -> None:
        self.ttft_s = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.")
        self.e2e_latency_s = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.")
        self.tpot_s = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Seconds per token after the first, per request."
        )
        # The latest latencies with the monotonic time at which they were known, in seconds; read copies of them.
        self.recent_ttft_s: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT)
        self.recent_tpot_s: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT)

    def _add_scheduling(self) -> None:
        """What the planner decides, how right it is, and what becomes of a drafter that fails."""
        self._verified_length = self._histogram(
            "dspark:verified_length", "Drafted tokens of a request that a step verifies.", DRAFT_BUCKETS
        )
        self._survival = self._labelled(
            Histogram,
            "dspark:survival",
            "Estimated chance that a draft is accepted up to a position.",
            "position",
            buckets=RATIO_BUCKETS,
        )
        self._declined = self._labelled(
            Counter, "dspark:drafts_declined", "Requests not drafted for, by why.", "reason"
        )
        self.num_probes = self._counter("dspark:drafting_probes", "Requests drafted for to see whether it pays again.")
        self._predicted_s = self._gauge("dspark:predicted_step_seconds", "Predicted seconds of the latest step.")
        self._actual_s = self._gauge("dspark:actual_step_seconds", "Seconds that the latest predicted step took.")
        self._step_error = self._histogram(
            "dspark:step_seconds_per_predicted", "Actual per predicted seconds of steps.", ERROR_BUCKETS
        )
        self._calibration_error = self._labelled(
            Gauge, "dspark:calibration_error", "Rolling calibration error of confidences, by position.", "position"
        )
        self._state = self._labelled(Gauge, "dspark:speculation_state", "1 for the present state.", "state")
        self.show_speculation_state("on")
        self._breaker = self._labelled(
            Counter, "dspark:breaker_changes", "Times that drafting was switched off or on again by itself.", "to"
        )
        self.num_plain_retries = self._counter("dspark:plain_retries", "Steps run again without drafts.")
        self.memory_bandwidth = self._gauge(
            "dspark:memory_bandwidth_bytes_per_second", "Weights read per second of target passes."
        )
        self.memory_bandwidth_peak = self._gauge(
            "dspark:memory_bandwidth_peak_bytes_per_second", "What this machine reached when it was measured."
        )

    def observe_plan(self, length: int, survivals: Sequence[float]) -> None:
        """Count one draft of which a step verifies `length` tokens; survivals a_1 .. of all of it."""
        self._verified_length.observe(length)
        for position, survival in enumerate(survivals):
            self._survival.labels(self._model_name, str(position)).observe(survival)

    def count_declined(self, reason: str, num_requests: int) -> None:
        """Count requests that could have had a draft in this step and get none."""
        if num_requests:
            self._declined.labels(self._model_name, reason).inc(num_requests)

    def observe_prediction(self, predicted_s: float, actual_s: float) -> None:
        """Compare a step with what was predicted of it; both above 0."""
        self._predicted_s.set(predicted_s)
        self._actual_s.set(actual_s)
        self._step_error.observe(actual_s / predicted_s)

    def show_calibration_error(self, errors: Sequence[float | None]) -> None:
        """Set the rolling calibration error of each position where it is known."""
        for position, error in enumerate(errors):
            if error is not None:
                self._calibration_error.labels(self._model_name, str(position)).set(error)

    def show_speculation_state(self, state: str) -> None:
        """Set which of `SPECULATION_STATES` holds."""
        for name in SPECULATION_STATES:
            self._state.labels(self._model_name, name).set(name == state)

    def count_breaker(self, to: str) -> None:
        """Count a change of the drafter's breaker, to "open" or "closed"."""
        self._breaker.labels(self._model_name, to).inc()

    def observe_round(self, proposer: str, *, num_verified: int, num_accepted: int, num_emitted: int) -> None:
        """Count one verification round of one request that had a draft, made by `proposer`."""
        self._rounds_per_proposer.labels(self._model_name, proposer).inc()
        self._verified_per_proposer.labels(self._model_name, proposer).inc(num_verified)
        self._accepted_per_proposer.labels(self._model_name, proposer).inc(num_accepted)
        self.num_rounds.inc()
        self.num_verified.inc(num_verified)
        self.num_accepted.inc(num_accepted)
        self.num_emitted.inc(num_emitted)
        for position in range(num_verified):
            self._verified_per_position.labels(self._model_name, str(position)).inc()
        for position in range(num_accepted):
            self._accepted_per_position.labels(self._model_name, str(position)).inc()

    def observe_step(self, phase_s: dict[str, float], num_tokens: int, max_tokens: int) -> None:
        """Count one step: seconds by phase (`STEP_PHASES`), the tokens in its target pass and the token budget."""
        self.num_steps.inc()
        self.batch_tokens.observe(num_tokens)
        self.batch_utilisation.observe(num_tokens / max_tokens)
        for phase, seconds in phase_s.items():
            self._step_s.labels(self._model_name, phase).inc(seconds)

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds spent so far in each phase of `STEP_PHASES`."""
        labels = {"model_name": self._model_name}
        return {
            phase: self.registry.get_sample_value("dspark:step_seconds_total", {**labels, "phase": phase}) or 0.0
            for phase in STEP_PHASES
        }

    def observe_first_token(self, ttft_s: float) -> None:
        """Count the first token of a request."""
        self.ttft_s.observe(ttft_s)
        self.recent_ttft_s.append((time.monotonic(), ttft_s))

    def observe_finish(self, output: RequestOutput, *, e2e_s: float, tpot_s: float | None) -> None:
        """Count one ended request."""
        assert output.finish_reason is not None
        self._requests.labels(self._model_name, output.finish_reason.value).inc()
        self.e2e_latency_s.observe(e2e_s)
        if tpot_s is not None:
            self.tpot_s.observe(tpot_s)
            self.recent_tpot_s.append((time.monotonic(), tpot_s))

    def _counter(self, name: str, text: str) -> Counter:
        return self._labelled(Counter, name, text).labels(self._model_name)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._labelled(Gauge, name, text).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS) -> Histogram:
        return self._labelled(Histogram, name, text, buckets=buckets).labels(self._model_name)

    def _labelled(self, kind: type[M], name: str, text: str, *labels: str, **options: Any) -> M:
        metric = kind(name, text, ["model_name", *labels], registry=self.registry, **options)
        if name in OWN_NAMES:
            self._sources.append(metric)
        return metric
