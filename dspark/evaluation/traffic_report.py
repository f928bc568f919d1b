"""What is reported of clients and a server: outcomes, errors by kind, latencies, memory, and the bounds that hold."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dspark.evaluation.http_call import CallResult, Outcome
from dspark.evaluation.traffic_run import Run, Sample, TrafficConfig

MAX_EXAMPLES = 3  # shown of each kind of problem
MAX_MEMORY_DRIFT = 0.02
MAX_MORE_OPEN_FILES = 4


@dataclass(frozen=True, kw_only=True)
class Check:
    """A bound, and whether it is held. `value` None: it could not be measured, which holds nothing."""

    name: str
    value: float | None
    low: float | None = None  # None: as low as may be
    high: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the value is known and between the bounds, which are allowed themselves."""
        if self.value is None:
            return False
        return (self.low is None or self.value >= self.low) and (self.high is None or self.value <= self.high)

    @property
    def bound(self) -> str:
        """The bound in words."""
        if self.low is None or self.high is None:
            return f"at least {self.low:g}" if self.high is None else f"at most {self.high:g}"
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"

    def to_json(self) -> dict[str, Any]:
        """Return it with what follows from it."""
        return asdict(self) | {"is_met": self.is_met}


@dataclass(frozen=True, kw_only=True)
class Window:
    """A stretch of a run, in seconds since its start; its end is not part of it."""

    start_s: float
    end_s: float

    def holds(self, at_s: float | None) -> bool:
        """Whether this time is in it."""
        return at_s is not None and self.start_s <= at_s < self.end_s


def outcomes(results: Sequence[CallResult]) -> dict[str, dict[str, int]]:
    """Count what came of the calls of each kind."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault(result.call.kind, Counter())[result.outcome.value] += 1
    return {kind: dict(counts[kind]) for kind in sorted(counts)}


def problems(results: Sequence[CallResult]) -> list[dict[str, Any]]:
    """Return errors by kind, the most frequent first, with examples."""
    failed: dict[str, list[CallResult]] = {}
    for result in results:
        if result.outcome is Outcome.FAILED:
            failed.setdefault(result.problem, []).append(result)
    return [
        {
            "problem": problem,
            "count": len(of_it),
            "examples": [
                {"kind": one.call.kind, "at_s": round(one.started_s, 3), "detail": one.detail}
                for one in of_it[:MAX_EXAMPLES]
            ],
        }
        for problem, of_it in sorted(failed.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def latency(results: Sequence[CallResult], kinds: Collection[str], window: Window) -> dict[str, float | None]:
    """Return percentiles (ms) of the answered calls of these kinds that ended in a window.

    By their ends, so that what is still under way when a run ends is missing from no window.
    """
    measured = [
        r for r in results if r.outcome is Outcome.ANSWERED and r.call.kind in kinds and window.holds(r.ended_s)
    ]
    ttft_s = [r.ttft_s for r in measured if r.ttft_s is not None]
    tpot_s = [r.tpot_s for r in measured if r.tpot_s is not None]
    return {
        "num_calls": len(measured),
        "ttft_ms_p50": _percentile_ms(ttft_s, 50),
        "ttft_ms_p95": _percentile_ms(ttft_s, 95),
        "tpot_ms_p50": _percentile_ms(tpot_s, 50),
        "tpot_ms_p95": _percentile_ms(tpot_s, 95),
    }


def _percentile_ms(seconds: Sequence[float], percent: int) -> float | None:
    if len(seconds) < 2:
        return None
    return round(1e3 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1], 3)


def memory(samples: Sequence[Sample], first: Window, last: Window) -> dict[str, float | None]:
    """Return the median memory of the server in two windows, and its growth from one to the other as a share."""
    values = [_median([s.memory_bytes for s in samples if window.holds(s.at_s)]) for window in (first, last)]
    drift = None if values[0] is None or values[1] is None else round(values[1] / values[0] - 1.0, 5)
    return {"first_bytes": values[0], "last_bytes": values[1], "drift": drift}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def ratio(value: float | None, base: float | None) -> float | None:
    """Return value / base; None where either is not known or the base is 0."""
    return round(value / base, 4) if value is not None and base else None


def common_checks(run: Run, exit_status: int, memory_drift: float | None) -> list[Check]:
    """Return the bounds that every run has."""
    results, after = run.results, run.after
    num_answered = sum(r.outcome is Outcome.ANSWERED for r in results)
    return [
        Check(name="unexplained errors", value=sum(r.outcome is Outcome.FAILED for r in results), high=0),
        Check(name="answered calls", value=num_answered, low=1),
        Check(name="share of pages in use at the end", value=after.kv_cache_usage, low=0, high=0),
        Check(name="requests left at the end", value=after.num_running + after.num_waiting, low=0, high=0),
        Check(
            name="more open files at the end than before",
            value=after.num_open_files - run.before.num_open_files,
            high=MAX_MORE_OPEN_FILES,
        ),
        Check(name="growth of memory", value=memory_drift, high=MAX_MEMORY_DRIFT),
        Check(name="exit status of the server", value=exit_status, low=0, high=0),
    ]


def common_report(
    kind: str,
    config: TrafficConfig,
    run: Run,
    exit_status: int,
    *,
    windows: Mapping[str, Window],
    checks: Sequence[Check],
) -> dict[str, Any]:
    """Return what every report says of its run, as JSON values."""
    return {
        "kind": kind,
        "settings": asdict(config),
        "duration_s": round(run.duration_s, 1),
        "is_interrupted": run.is_interrupted,
        "outcomes": outcomes(run.results),
        "problems": problems(run.results),
        "windows": {name: asdict(window) for name, window in windows.items()},
        "before": asdict(run.before),
        "after": asdict(run.after),
        "exit_status": exit_status,
        "checks": [check.to_json() for check in checks],
        "samples": [asdict(sample) for sample in run.samples],
    }


def is_good(report: Mapping[str, Any]) -> bool:
    """Whether a report holds all its bounds."""
    return all(check["is_met"] for check in report["checks"])


def print_traffic(report: Mapping[str, Any], console: Console) -> None:
    """Print outcomes by kind of call, errors, what is special to the report's kind, and the bounds."""
    table = Table("calls", *(outcome.value for outcome in Outcome), title=f"{report['kind']}: calls")
    for kind, counts in report["outcomes"].items():
        table.add_row(kind, *(str(counts.get(outcome.value, "")) for outcome in Outcome))
    console.print(table)
    for problem in report["problems"]:
        console.print(f"{problem['count']} x {problem['problem']}, such as {problem['examples'][0]}", markup=False)
    for name, figures in report["latency"].items():
        shown = ", ".join(f"{key} {_shown(value)}" for key, value in figures.items())
        console.print(f"{name}: {shown}", markup=False)
    bounds = Table("bound", "allowed", "measured", "", title="bounds")
    for fields in report["checks"]:
        check = Check(**{name: fields[name] for name in ("name", "value", "low", "high")})
        bounds.add_row(check.name, check.bound, _shown(check.value), "held" if check.is_met else "[bold]MISSED")
    console.print(bounds)


def missed_line(report: Mapping[str, Any]) -> str:
    """Return in a line which bounds are missed."""
    missed = []
    for fields in report["checks"]:
        check = Check(**{name: fields[name] for name in ("name", "value", "low", "high")})
        if not check.is_met:
            missed.append(f"{check.name} is {_shown(check.value)}, allowed is {check.bound}")
    return "; ".join(missed)


def _shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:g}"
