"""Metrics: one count under two names, zeros from the start."""

from __future__ import annotations

from prometheus_client import generate_latest

from dspark.metrics import OWN_NAMES, EngineMetrics


def lines(metrics: EngineMetrics) -> dict[str, float]:
    text = generate_latest(metrics.registry).decode()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}


def test_every_vllm_name_has_its_own_twin_with_the_same_value():
    metrics = EngineMetrics("m")
    metrics.generation_tokens.inc(3)
    metrics.num_running.set(2)
    metrics.ttft_s.observe(0.03)
    metrics.observe_round("ngram", num_verified=3, num_accepted=2, num_emitted=3)
    found = lines(metrics)
    assert (
        found['vllm:generation_tokens_total{model_name="m"}']
        == found['dspark:generation_tokens_total{model_name="m"}']
        == 3
    )
    assert found['dspark:requests_running{model_name="m"}'] == 2
    assert found['dspark:time_to_first_token_seconds_bucket{le="0.04",model_name="m"}'] == 1
    assert found['dspark:accepted_tokens_per_pos_total{model_name="m",position="1"}'] == 1
    vllm = {name for name in found if name.startswith("vllm:")}
    for name in vllm:
        source = max((n for n in OWN_NAMES if name.startswith(n)), key=len)
        assert found[OWN_NAMES[source] + name.removeprefix(source)] == found[name]
    assert len(vllm) > 20


def test_reasons_that_never_happened_are_exported_as_zero():
    found = lines(EngineMetrics("m"))
    assert found['vllm:request_success_total{finished_reason="abort",model_name="m"}'] == 0


def test_two_engines_in_one_process_count_apart():
    first, second = EngineMetrics("m"), EngineMetrics("m")
    first.generation_tokens.inc()
    assert lines(second)['vllm:generation_tokens_total{model_name="m"}'] == 0


def test_creation_times_are_not_exported():
    assert not any("_created" in name for name in lines(EngineMetrics("m")))
