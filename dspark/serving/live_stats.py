"""What the server does now and did lately, read once a second from the metrics; no step waits for that.

Rates are differences of the counters that /metrics exports, so that both tell the same story.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.metrics import EngineMetrics

SAMPLE_INTERVAL_S = 1.0
HISTORY_LEN = 180  # samples that a fresh page gets to draw
WINDOW_S = 60.0  # of acceptance, the planner's decisions and predictions
NOW_S = 10.0  # of the figures that say "now"
LATENCY_WINDOW_S = 120.0
PERCENTILES = (50, 95)

GENERATED, FIRST_TOKENS = "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
RUNNING, WAITING, KV_USAGE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
STEPS, STEP_S = "dspark:steps_total", "dspark:step_seconds_total"
DRAFTS, EMITTED = "vllm:spec_decode_num_drafts_total", "dspark:round_emitted_tokens_total"
VERIFIED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
VERIFIED_AT, ACCEPTED_AT = "dspark:verified_tokens_per_pos_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"
PROPOSER_DRAFTS = "dspark:verification_rounds_per_proposer_total"
PROPOSER_VERIFIED = "dspark:verified_tokens_per_proposer_total"
PROPOSER_ACCEPTED = "dspark:accepted_tokens_per_proposer_total"
PLANNED_LEN = "dspark:verified_length_bucket"
DECLINED, PROBES = "dspark:drafts_declined_total", "dspark:drafting_probes_total"
PREDICTED_S, ACTUAL_S = "dspark:predicted_step_seconds", "dspark:actual_step_seconds"
NUM_PREDICTED, ERROR_SUM = "dspark:step_seconds_per_predicted_count", "dspark:step_seconds_per_predicted_sum"
FAILURES, BREAKER_CHANGES = "dspark:drafter_failures_total", "dspark:breaker_changes_total"
READ = (
    *(GENERATED, FIRST_TOKENS, PROMPT_TOKENS, RUNNING, WAITING, KV_USAGE, STEPS, STEP_S, DRAFTS, EMITTED),
    *(VERIFIED, ACCEPTED, VERIFIED_AT, ACCEPTED_AT, PROPOSER_DRAFTS, PROPOSER_VERIFIED, PROPOSER_ACCEPTED),
    *(PLANNED_LEN, DECLINED, PROBES, PREDICTED_S, ACTUAL_S, NUM_PREDICTED, ERROR_SUM, FAILURES, BREAKER_CHANGES),
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The metrics at one time."""

    time_s: float  # monotonic
    values: dict[tuple[str, str], float]  # by name and label ("" where a metric has none beside the model's name)

    def value(self, name: str, label: str = "") -> float:
        """Return one value; 0 for what has never been counted."""
        return self.values.get((name, label), 0.0)

    def labels(self, name: str) -> list[str]:
        """Return the labels that have a value."""
        return [label for found, label in self.values if found == name]


@dataclass(frozen=True, kw_only=True)
class Span:
    """What was counted between two readings."""

    first: Reading
    last: Reading

    @property
    def seconds(self) -> float:
        return self.last.time_s - self.first.time_s

    def count(self, name: str, label: str = "") -> float:
        """Return by how much a counter grew."""
        return self.last.value(name, label) - self.first.value(name, label)

    def total(self, name: str) -> float:
        """Return by how much a counter grew, over all its labels."""
        return sum(self.count(name, label) for label in self.last.labels(name))

    def per_second(self, name: str) -> float | None:
        """Return a counter's growth per second; None where no time passed."""
        return _ratio(self.count(name), self.seconds)

    @property
    def num_rounds(self) -> float:
        """Decoding rounds, one for each request of a step: with a draft, or plain ones, which give one token each."""
        return self.count(DRAFTS) + self.count(GENERATED) - self.count(EMITTED) - self.count(FIRST_TOKENS)

    @property
    def user_tokens_per_s(self) -> float | None:
        """Tokens per second that one decoding request gets: tokens of a round over the seconds of a step."""
        num_tokens = self.count(GENERATED) - self.count(FIRST_TOKENS)
        tokens_per_round, step_s = _ratio(num_tokens, self.num_rounds), _ratio(self.total(STEP_S), self.count(STEPS))
        return _ratio(tokens_per_round, step_s)

    @property
    def verified_len(self) -> float | None:
        """Mean verified tokens of a draft."""
        return _ratio(self.count(VERIFIED), self.count(DRAFTS))

    @property
    def accepted_len(self) -> float | None:
        """Mean tokens of a round, the target's own included (tau in the paper)."""
        return _ratio(self.count(GENERATED) - self.count(FIRST_TOKENS), self.num_rounds)


class LiveStats:
    """Samples one engine's metrics and remembers the last minutes. For the event loop's thread."""

    def __init__(self, metrics: EngineMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._registry = metrics.registry.restricted_registry(READ)
        self._readings: deque[Reading] = deque(maxlen=round(WINDOW_S / SAMPLE_INTERVAL_S) + 1)
        self._history: deque[dict[str, float | None]] = deque(maxlen=HISTORY_LEN)
        self._started_s = clock()

    async def run(self) -> None:
        """Sample for ever."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def sample(self) -> None:
        """Read the metrics once."""
        reading = self._read()
        self._readings.append(reading)
        span = Span(first=self._readings[-2] if len(self._readings) > 1 else reading, last=reading)
        ttft_ms = percentiles_ms(self._recent(self._metrics.recent_ttft_s))
        tpot_ms = percentiles_ms(self._recent(self._metrics.recent_tpot_s))
        is_predicted = span.count(NUM_PREDICTED) > 0  # else the gauges speak of an older step
        self._history.append(
            {
                "time_s": reading.time_s - self._started_s,
                "tokens_per_s": span.per_second(GENERATED),
                "user_tokens_per_s": span.user_tokens_per_s,
                "running": reading.value(RUNNING),
                "waiting": reading.value(WAITING),
                "kv_usage": reading.value(KV_USAGE),
                "ttft_p50_ms": ttft_ms[0],
                "ttft_p95_ms": ttft_ms[1],
                "tpot_p50_ms": tpot_ms[0],
                "tpot_p95_ms": tpot_ms[1],
                "verified_len": span.verified_len,
                "accepted_len": span.accepted_len,
                "predicted_ms": 1e3 * reading.value(PREDICTED_S) if is_predicted else None,
                "actual_ms": 1e3 * reading.value(ACTUAL_S) if is_predicted else None,
            }
        )

    @property
    def uptime_s(self) -> float:
        """Seconds since this was made."""
        return self._clock() - self._started_s

    @property
    def latest(self) -> Reading:
        """The latest sample, taken now if there is none."""
        if not self._readings:
            self.sample()
        return self._readings[-1]

    def span(self, seconds: float) -> Span:
        """Return what was counted in about the last so many seconds, of those that were sampled."""
        last = self.latest
        first = next(r for r in self._readings if last.time_s - r.time_s <= seconds + SAMPLE_INTERVAL_S / 2)
        return Span(first=first, last=last)

    def history(self) -> dict[str, list[float | None]]:
        """Return the samples as one list for each figure, oldest first, rounded for the wire."""
        assert self.latest  # there is one, at least
        return {name: [_rounded(row[name]) for row in self._history] for name in self._history[-1]}

    def now(self) -> dict[str, Any]:
        """Return the present figures, rates over the last seconds."""
        span = self.span(NOW_S)
        fields = {
            "tokens_per_s": span.per_second(GENERATED),
            "user_tokens_per_s": span.user_tokens_per_s,
            "prompt_tokens_per_s": span.per_second(PROMPT_TOKENS),
            "running": span.last.value(RUNNING),
            "waiting": span.last.value(WAITING),
            "kv_usage": span.last.value(KV_USAGE),
            "verified_len": span.verified_len,
            "accepted_len": span.accepted_len,
        }
        return {"window_s": NOW_S, **{name: _rounded(value) for name, value in fields.items()}}

    def latency(self) -> dict[str, Any]:
        """Return percentiles of first tokens and of ended requests' time per later token, with their counts."""
        fields: dict[str, Any] = {"window_s": LATENCY_WINDOW_S}
        for name, recent in (("ttft", self._metrics.recent_ttft_s), ("tpot", self._metrics.recent_tpot_s)):
            values = self._recent(recent)
            for percentile, value in zip(PERCENTILES, percentiles_ms(values), strict=True):
                fields[f"{name}_p{percentile}_ms"] = _rounded(value)
            fields[f"{name}_count"] = len(values)
        return fields

    def acceptance(self) -> dict[str, Any]:
        """Return how drafts fared by position (of drafts verified at least so far) and by proposer."""
        span = self.span(WINDOW_S)
        positions = []
        for label in sorted(span.last.labels(VERIFIED_AT), key=int):
            verified, accepted = span.count(VERIFIED_AT, label), span.count(ACCEPTED_AT, label)
            positions.append(
                {
                    "position": int(label) + 1,
                    "verified": verified,
                    "accepted": accepted,
                    "rate": _rounded(_ratio(accepted, verified)),
                }
            )
        proposers = [
            {
                "name": label,
                "drafts": span.count(PROPOSER_DRAFTS, label),
                "verified": span.count(PROPOSER_VERIFIED, label),
                "accepted": span.count(PROPOSER_ACCEPTED, label),
                "rate": _rounded(_ratio(span.count(PROPOSER_ACCEPTED, label), span.count(PROPOSER_VERIFIED, label))),
            }
            for label in sorted(span.last.labels(PROPOSER_DRAFTS))
        ]
        rate = _rounded(_ratio(span.count(ACCEPTED), span.count(VERIFIED)))
        return {"window_s": WINDOW_S, "rate": rate, "positions": positions, "proposers": proposers}

    def prediction(self) -> dict[str, Any]:
        """Return how long steps were expected to take and took: the latest one, and the mean ratio of the window."""
        span = self.span(WINDOW_S)
        is_known = span.last.value(NUM_PREDICTED) > 0
        return {
            "window_s": WINDOW_S,
            "predicted_ms": _rounded(1e3 * span.last.value(PREDICTED_S)) if is_known else None,
            "actual_ms": _rounded(1e3 * span.last.value(ACTUAL_S)) if is_known else None,
            "mean_ratio": _rounded(_ratio(span.count(ERROR_SUM), span.count(NUM_PREDICTED))),
            "steps": span.count(NUM_PREDICTED),
        }

    def _read(self) -> Reading:
        values = {
            (sample.name, _label(sample.labels)): sample.value
            for metric in self._registry.collect()
            for sample in metric.samples
        }
        return Reading(time_s=self._clock(), values=values)

    def _recent(self, latencies: deque[tuple[float, float]]) -> list[float]:
        since = self._clock() - LATENCY_WINDOW_S
        return [seconds for known_s, seconds in latencies.copy() if known_s >= since]


def percentiles_ms(seconds: Sequence[float]) -> list[float | None]:
    """Return `PERCENTILES` in milliseconds; None of nothing."""
    if not seconds:
        return [None] * len(PERCENTILES)
    return [float(value) for value in np.percentile(seconds, PERCENTILES) * 1e3]


def _label(labels: dict[str, str]) -> str:
    return next((value for name, value in labels.items() if name != "model_name"), "")


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or denominator is None or denominator <= 0.0:
        return None
    return numerator / denominator


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
