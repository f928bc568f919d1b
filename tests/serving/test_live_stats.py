"""Figures of the dashboard from the metrics, on a clock of the test's own."""

from __future__ import annotations

import time

import pytest

from dspark.metrics import EngineMetrics
from dspark.request import FinishReason, RequestOutput
from dspark.serving.live_stats import HISTORY_LEN, READ, LiveStats, percentiles_ms


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("m")


@pytest.fixture
def live(metrics: EngineMetrics, clock: Clock) -> LiveStats:
    return LiveStats(metrics, clock)


def decode(metrics: EngineMetrics, *, num_steps: int, num_plain: int, num_drafts: int = 0, accepted: int = 0) -> None:
    """Count steps of 50 ms with so many rounds: plain ones, and drafts of 4 tokens with `accepted` accepted each."""
    for _ in range(num_steps):
        metrics.observe_step({"forward": 0.04, "draft": 0.01}, 10, 100)
    metrics.generation_tokens.inc(num_plain)
    for _ in range(num_drafts):
        metrics.observe_round("ngram", num_verified=4, num_accepted=accepted, num_emitted=accepted + 1)
        metrics.generation_tokens.inc(accepted + 1)


def test_every_metric_it_reads_exists(metrics: EngineMetrics) -> None:
    names = {
        f"{family.name}{suffix}"
        for family in metrics.registry.collect()
        for suffix in ("", "_total", "_sum", "_count", "_bucket")
    }
    assert set(READ) <= names


def test_rates_are_what_was_counted_per_second(live: LiveStats, metrics: EngineMetrics, clock: Clock) -> None:
    live.sample()
    decode(metrics, num_steps=10, num_plain=20)
    metrics.prompt_tokens.inc(30)
    clock.now_s += 2
    live.sample()
    now = live.now()
    assert (now["tokens_per_s"], now["prompt_tokens_per_s"]) == (10.0, 15.0)


def test_a_request_gets_the_tokens_of_a_round_in_the_time_of_a_step(
    live: LiveStats, metrics: EngineMetrics, clock: Clock
) -> None:
    """10 plain rounds and 10 drafts that give 3 tokens each are 2 tokens a round; a step takes 50 ms."""
    live.sample()
    decode(metrics, num_steps=5, num_plain=10, num_drafts=10, accepted=2)
    metrics.observe_first_token(0.1)
    metrics.generation_tokens.inc()  # the first token comes from the prefill: no round's
    clock.now_s += 1
    live.sample()
    now = live.now()
    assert (now["accepted_len"], now["verified_len"], now["user_tokens_per_s"]) == (2.0, 4.0, 40.0)


def test_nothing_decoded_is_unknown_and_not_zero(live: LiveStats, clock: Clock) -> None:
    live.sample()
    clock.now_s += 1
    live.sample()
    now = live.now()
    assert (now["tokens_per_s"], now["user_tokens_per_s"], now["accepted_len"]) == (0.0, None, None)


def test_a_first_look_samples_by_itself(live: LiveStats, metrics: EngineMetrics) -> None:
    metrics.num_running.set(3)
    assert live.now()["running"] == 3
    assert live.history()["running"] == [3]


def test_now_is_the_last_ten_seconds(live: LiveStats, metrics: EngineMetrics, clock: Clock) -> None:
    for _ in range(30):
        live.sample()
        metrics.generation_tokens.inc(100 if clock.now_s < 115 else 7)
        clock.now_s += 1
    live.sample()
    assert live.now()["tokens_per_s"] == 7.0


def test_the_history_is_bounded_and_oldest_first(live: LiveStats, metrics: EngineMetrics, clock: Clock) -> None:
    for i in range(HISTORY_LEN + 5):
        metrics.num_waiting.set(i)
        live.sample()
        clock.now_s += 1
    history = live.history()
    assert history["waiting"] == list(range(5, HISTORY_LEN + 5))
    assert history["time_s"][:2] == [5.0, 6.0]
    assert {len(values) for values in history.values()} == {HISTORY_LEN}


def test_acceptance_is_told_by_position_and_by_proposer(live: LiveStats, metrics: EngineMetrics, clock: Clock) -> None:
    """Case L3's drafts: 3, 1 and 0 accepted of 3, 3 and 1 verified ones."""
    metrics.observe_round("dspark", num_verified=9, num_accepted=9, num_emitted=10)
    live.sample()
    for verified, accepted in ((3, 3), (3, 1), (1, 0)):
        metrics.observe_round("ngram", num_verified=verified, num_accepted=accepted, num_emitted=accepted + 1)
    clock.now_s += 1
    live.sample()
    acceptance = live.acceptance()
    seen = [(p["position"], p["accepted"], p["verified"], p["rate"]) for p in acceptance["positions"] if p["verified"]]
    assert seen == [(1, 2, 3, 0.6667), (2, 1, 2, 0.5), (3, 1, 2, 0.5)]
    assert acceptance["rate"] == 0.5714
    assert acceptance["proposers"] == [
        {"name": "dspark", "drafts": 0, "verified": 0, "accepted": 0, "rate": None},
        {"name": "ngram", "drafts": 3, "verified": 7, "accepted": 4, "rate": 0.5714},
    ]


def test_predictions_are_drawn_only_where_there_was_one(live: LiveStats, metrics: EngineMetrics, clock: Clock) -> None:
    live.sample()
    metrics.observe_prediction(0.02, 0.03)
    metrics.observe_prediction(0.02, 0.01)
    clock.now_s += 1
    live.sample()
    clock.now_s += 1
    live.sample()
    history, prediction = live.history(), live.prediction()
    assert (history["predicted_ms"], history["actual_ms"]) == ([None, 20.0, None], [None, 10.0, None])
    assert (prediction["mean_ratio"], prediction["steps"], prediction["actual_ms"]) == (1.0, 2, 10.0)


def test_percentiles_are_of_single_requests_in_milliseconds() -> None:
    assert percentiles_ms([i / 1000 for i in range(101)]) == pytest.approx([50.0, 95.0])
    assert percentiles_ms([]) == [None, None]


def test_latencies_leave_after_two_minutes(metrics: EngineMetrics) -> None:
    live = LiveStats(metrics)
    metrics.observe_first_token(0.25)
    output = RequestOutput(request_id="r", finish_reason=FinishReason.STOP)
    metrics.observe_finish(output, e2e_s=1.0, tpot_s=0.04)
    metrics.observe_finish(output, e2e_s=1.0, tpot_s=None)
    metrics.recent_ttft_s.appendleft((time.monotonic() - 121, 9.0))
    latency = live.latency()
    assert (latency["ttft_p50_ms"], latency["ttft_count"]) == (250.0, 1)
    assert (latency["tpot_p95_ms"], latency["tpot_count"]) == (40.0, 1)
