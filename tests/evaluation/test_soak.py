"""Reports of soaks and load tests: each bound in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dspark.errors import ConfigError, DsparkError
from dspark.evaluation.http_call import Call, CallResult, Outcome
from dspark.evaluation.load_test import LoadConfig, load_call, load_report, pace
from dspark.evaluation.soak import SoakConfig, compare_canaries, soak_report, soak_windows
from dspark.evaluation.traffic_report import Check, Window, is_good, latency, missed_line
from dspark.evaluation.traffic_run import Run, Sample

SOAK = SoakConfig(duration_s=1200.0)
LOAD = LoadConfig(duration_s=100.0, num_streams=10)
REST = Sample(
    at_s=0.0, memory_bytes=1e9, num_open_files=20, kv_cache_usage=0.0, num_running=0, num_waiting=0, num_tokens=0,
    num_drafter_failures=5, num_breaker_changes=0,
)  # fmt: skip


def call_result(kind: str, start_s: float, ttft_s: float = 0.1, tpot_s: float = 0.05, **fields: Any) -> CallResult:
    first_s = start_s + ttft_s
    return CallResult(
        **{
            "call": Call(kind=kind, path="/"),
            "started_s": start_s,
            "ended_s": first_s + 10 * tpot_s,
            "outcome": Outcome.ANSWERED,
            "arrivals": [(first_s, 1), (first_s + 10 * tpot_s, 11)],
            **fields,
        }
    )


def soak_run(last_ttft_s: float = 0.1, last_tpot_s: float = 0.05, last_bytes: float = 1e9, **fields: Any) -> Run:
    results = []
    for second in range(0, 1198):
        is_late = second >= 900
        ttft_s, tpot_s = (last_ttft_s, last_tpot_s) if is_late else (0.1, 0.05)
        results.append(call_result("greedy stream", second, ttft_s, tpot_s))
    results += [call_result("canary 0", second, texts={0: "same"}) for second in range(0, 1000, 100)]
    samples = [replace(REST, at_s=float(s), memory_bytes=last_bytes if s >= 600 else 1e9) for s in range(1200)]
    run = {"results": results, "samples": samples, "before": REST, "after": REST, "duration_s": 1200.0}
    return Run(**{**run, "is_interrupted": False, **fields})


def missed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if not check["is_met"]]


def test_a_run_whose_end_is_like_its_beginning_holds_all_bounds() -> None:
    report = soak_report(SOAK, soak_run(), exit_status=0)
    assert missed(report) == []
    assert is_good(report)
    assert missed_line(report) == ""
    assert (report["latency"]["first"]["num_calls"], report["latency"]["last"]["num_calls"]) == (300, 298)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"last_bytes": 1.02e9}, []),
        ({"last_bytes": 1.021e9}, ["growth of memory"]),
        ({"last_bytes": 0.9e9}, []),
        ({"last_ttft_s": 0.109}, []),
        ({"last_ttft_s": 0.111}, ["ttft_ms_p50, last per first", "ttft_ms_p95, last per first"]),
        ({"last_ttft_s": 0.089}, ["ttft_ms_p50, last per first", "ttft_ms_p95, last per first"]),
        ({"last_tpot_s": 0.0545}, []),
        ({"last_tpot_s": 0.056}, ["tpot_ms_p50, last per first", "tpot_ms_p95, last per first"]),
        ({"after": replace(REST, kv_cache_usage=0.01)}, ["share of pages in use at the end"]),
        ({"after": replace(REST, num_running=1)}, ["requests left at the end"]),
        ({"after": replace(REST, num_waiting=1)}, ["requests left at the end"]),
        ({"after": replace(REST, num_open_files=24)}, []),
        ({"after": replace(REST, num_open_files=25)}, ["more open files at the end than before"]),
        ({"after": replace(REST, num_drafter_failures=0)}, ["faults of the drafter"]),
    ],
)
def test_each_bound_is_missed_by_what_breaks_it_alone(changes: dict[str, Any], names: list[str]) -> None:
    assert missed(soak_report(SOAK, soak_run(**changes), exit_status=0)) == names


def test_errors_lost_canaries_and_a_bad_exit_miss_bounds() -> None:
    run = soak_run()
    run.results.append(call_result("greedy", 5, outcome=Outcome.FAILED, problem="status 500", detail="x"))
    run.results.append(call_result("canary 0", 1100, texts={0: "other"}))
    report = soak_report(SOAK, run, exit_status=1)
    assert missed(report) == ["unexplained errors", "exit status of the server", "answers of canaries that differ"]
    assert report["problems"] == [
        {"problem": "status 500", "count": 1, "examples": [{"kind": "greedy", "at_s": 5, "detail": "x"}]}
    ]
    assert "unexplained errors is 1, allowed is at most 0" in missed_line(report)
    (different,) = report["canaries"]["different"]
    assert (different["first"], different["now"]) == ({0: "same"}, {0: "other"})


def test_what_was_not_measured_holds_no_bound() -> None:
    report = soak_report(SOAK, soak_run(results=[], samples=[]), exit_status=0)
    assert len(missed(report)) == 7
    assert "growth of memory is not measured" in missed_line(report)


def test_canaries_that_failed_are_not_compared() -> None:
    first, cut = call_result("canary 1", 0, texts={0: "a"}), call_result("canary 1", 9, outcome=Outcome.CUT)
    assert compare_canaries([first, cut, call_result("greedy", 3, texts={0: "b"})]) == (0, [])


def test_five_minutes_after_the_first_are_compared_with_the_last_five() -> None:
    windows = soak_windows(SOAK)
    assert (windows["first"].start_s, windows["first"].end_s) == (60, 360)
    assert (windows["last"].start_s, windows["last"].end_s) == (900, 1200)
    assert SOAK.fault_period_s * 4 == 300


def test_latencies_are_of_answered_calls_of_the_kinds_that_ended_in_the_window() -> None:
    results = [
        call_result("a", 1.0, ttft_s=0.2),
        call_result("a", 2.0, ttft_s=0.2),
        call_result("a", 9.9, ttft_s=9.0),
        call_result("b", 1.0, ttft_s=9.0),
        call_result("a", 1.0, ttft_s=9.0, outcome=Outcome.CUT, ended_s=None),
    ]
    measured = latency(results, ("a",), Window(start_s=0.0, end_s=10.0))
    assert measured == {
        "num_calls": 2, "ttft_ms_p50": 200.0, "ttft_ms_p95": 200.0, "tpot_ms_p50": 50.0, "tpot_ms_p95": 50.0,
    }  # fmt: skip


def test_a_bound_is_allowed_itself() -> None:
    assert Check(name="x", value=0.02, high=0.02).is_met
    assert not Check(name="x", value=0.0201, high=0.02).is_met
    assert Check(name="x", value=1, low=1).is_met
    assert not Check(name="x", value=0, low=1).is_met
    assert not Check(name="x", value=None, low=0).is_met
    bounds = [{"low": 0, "high": 0}, {"low": 0.9, "high": 1.1}, {"high": 2}]
    words = [Check(name="x", value=0, **bound).bound for bound in bounds]
    assert words == ["0", "0.9 to 1.1", "at most 2"]


def load_run(rough_tokens: int) -> Run:
    results = []
    for start_s, num_tokens in ((20.0, 40), (60.0, rough_tokens)):
        arrivals = [(start_s + 1 + n * 0.01, n) for n in range(1, num_tokens + 1)]
        results.append(call_result("steady stream", start_s, arrivals=arrivals))
    samples = [replace(REST, at_s=float(s)) for s in range(100)]
    return Run(results=results, samples=samples, before=REST, after=REST, duration_s=100.0, is_interrupted=False)


@pytest.mark.parametrize(
    ("rough_tokens", "names"),
    [(40, []), (80, []), (37, []), (36, ["time per token of steady streams, rough per calm"])],
)
def test_steady_streams_must_not_be_slowed_by_the_others(rough_tokens: int, names: list[str]) -> None:
    assert missed(load_report(LOAD, load_run(rough_tokens), exit_status=0)) == names


def test_pace_counts_what_arrived_in_the_window_of_calls_under_way_too() -> None:
    cut = call_result("x", 0.0, outcome=Outcome.CUT, arrivals=[(1.0, 1), (4.9, 3), (5.0, 6), (9.0, 8), (10.0, 9)])
    assert pace([cut], 2, Window(start_s=5.0, end_s=10.0)) == 1e3 * 5 * 2 / 5
    assert pace([], 2, Window(start_s=5.0, end_s=10.0)) is None


def test_odd_clients_behave_in_the_calm_half_and_ask_for_as_much() -> None:
    body = {"max_tokens": 32}
    calm, rough = (load_call("hangs up", body, is_rough=is_rough) for is_rough in (False, True))
    assert (calm.body["max_tokens"], calm.leave_after_events) == (4, None)
    assert (rough.body["max_tokens"], rough.leave_after_events) == (32, 4)
    pauses = [load_call("reads slowly", body, is_rough=is_rough).read_pause_s for is_rough in (False, True)]
    assert pauses == [0.0, 5.0]
    assert (LOAD.num_odd, LOAD.num_steady) == (1, 8)


METRICS = """\
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 1000.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="toy"} 2.0
# TYPE dspark:breaker_changes counter
dspark:breaker_changes_total{model_name="toy",to="open"} 2.0
dspark:breaker_changes_total{model_name="toy",to="closed"} 1.0
"""


def test_metrics_are_read_and_added_up_over_labels() -> None:
    sample = Sample.parse(METRICS, 3.0)
    assert (sample.at_s, sample.memory_bytes, sample.num_running, sample.num_breaker_changes) == (3.0, 1000, 2, 3)
    assert not sample.is_at_rest
    assert Sample.parse("process_resident_memory_bytes 1.0\n", 0.0).is_at_rest
    with pytest.raises(DsparkError, match="does not tell the server's memory"):
        Sample.parse("", 0.0)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SoakConfig, {"duration_s": 7.9}),
        (SoakConfig, {"duration_s": float("inf")}),
        (SoakConfig, {"num_clients": 0}),
        (SoakConfig, {"seed": -1}),
        (SoakConfig, {"rehearsed_tokens": -1}),
        (LoadConfig, {"duration_s": 4.9}),
        (LoadConfig, {"num_streams": 2}),
        (LoadConfig, {"rehearsed_tokens": -1}),
    ],
)
def test_settings_that_measure_nothing_are_refused(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        kind(**settings)
