"""A soak: mixed traffic for a long time, with clients that leave, bad requests and a drafter that fails in bursts.

What is asked of the server is that nothing unexplained happens and that the end is like the beginning.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dspark.errors import ConfigError
from dspark.evaluation.http_call import CallResult, Outcome
from dspark.evaluation.server_process import rehearse, running_server, served_model
from dspark.evaluation.traffic import MEASURED, Traffic, canaries
from dspark.evaluation.traffic_report import Check, Window, common_checks, common_report, latency, memory, ratio
from dspark.evaluation.traffic_run import Progress, Run, Session, TrafficConfig, run_clients

# Shares of the duration; of 20 minutes: 1 minute, 5 minutes, 1 minute, 75 seconds.
WARM_UP_SHARE = 1 / 20
WINDOW_SHARE = 1 / 4  # whose latencies are compared, after the warm-up and at the end
MEMORY_SHARE = 1 / 20  # whose memory is compared
FAULT_PERIOD_SHARE = 1 / 16  # so that any window holds the same bursts of faults: four of them
SWITCHED_OFF = (0.4, 0.55)  # share of each such period without speculation, by /admin/speculation
LATENCIES = ("ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50", "tpot_ms_p95")
MAX_LATENCY_CHANGE = 0.1
CANARY_PAUSE_S = 0.2
# Few pages, so that prefixes are evicted and requests sent back, and all are touched before memory is compared.
SERVER_FLAGS = ("--log-level", "warning", "--cache-tokens", "8192")


@dataclass(frozen=True, kw_only=True)
class SoakConfig(TrafficConfig):
    """How long and how hard; `seed` is that of the traffic."""

    min_duration_s: ClassVar[float] = 8.0

    duration_s: float = 1200.0
    num_clients: int = 16  # each makes one call after the other

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_clients < 1:
            raise ConfigError(f"num_clients ({self.num_clients}) must be at least 1; raise it")
        if self.seed < 0:
            raise ConfigError(f"seed ({self.seed}) must not be negative; choose another")

    @property
    def fault_period_s(self) -> float:
        """Seconds from one burst of faults to the next."""
        return FAULT_PERIOD_SHARE * self.duration_s


def run_soak(
    soak: SoakConfig, serve_flags: Sequence[str], texts: Sequence[str], *, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Start a server with these flags of `dspark serve`, soak it in calls about `texts`, end it, and report.

    Ctrl-C ends it early; the report is of what was measured so far.
    """
    admin_key = secrets.token_hex(16)
    own_flags = ("--admin-key", admin_key, "--fault-period", str(soak.fault_period_s))
    with running_server([*SERVER_FLAGS, *own_flags, *serve_flags]) as server:
        progress(f"the server is ready at {server.url}")
        model, max_model_len = served_model(server)
        rehearse(server, soak.rehearsed_tokens)
        progress("all sizes of a pass have been run; the traffic begins")
        traffic = iter(Traffic(model, texts, max_model_len=max_model_len, seed=soak.seed))

        async def client(session: Session) -> None:
            while True:
                await session.call(next(traffic))

        async def canary_client(session: Session) -> None:
            calls = canaries(model, texts)
            while True:
                for call in calls:
                    await session.call(call)
                    await asyncio.sleep(CANARY_PAUSE_S)

        async def switcher(session: Session) -> None:
            while True:
                for is_on, share in ((False, SWITCHED_OFF[0]), (True, SWITCHED_OFF[1])):
                    place_s = session.elapsed_s % soak.fault_period_s
                    await asyncio.sleep((share * soak.fault_period_s - place_s) % soak.fault_period_s)
                    await session.switch_speculation(is_on, admin_key)

        run = run_clients(
            server,
            [*[client] * soak.num_clients, canary_client, switcher],
            duration_s=soak.duration_s,
            progress=progress,
            line_every_s=min(10.0, soak.duration_s / 4),
        )
        exit_status = server.stop()
    return soak_report(soak, run, exit_status) | {"serve_flags": [*SERVER_FLAGS, *serve_flags]}


def soak_report(soak: SoakConfig, run: Run, exit_status: int) -> dict[str, Any]:
    """Reduce a run to a report with the bounds that must hold."""
    windows = soak_windows(soak)
    times = {name: latency(run.results, MEASURED, windows[name]) for name in ("first", "last")}
    used = memory(run.samples, windows["first memory"], windows["last memory"])
    num_answers, different = compare_canaries(run.results)
    allowed = {"low": 1 - MAX_LATENCY_CHANGE, "high": 1 + MAX_LATENCY_CHANGE}
    checks = [
        *common_checks(run, exit_status, used["drift"]),
        Check(name="answers of canaries compared", value=num_answers, low=1),
        Check(name="answers of canaries that differ", value=len(different), high=0),
        Check(name="faults of the drafter", value=run.after.num_drafter_failures, low=1),
        *(
            Check(name=f"{name}, last per first", value=ratio(times["last"][name], times["first"][name]), **allowed)
            for name in LATENCIES
        ),
    ]
    return common_report("soak", soak, run, exit_status, windows=windows, checks=checks) | {
        "latency": times,
        "memory": used,
        "canaries": {"num_compared": num_answers, "different": different[:3]},
        "times": measured_times(run.results, MEASURED),
    }


def soak_windows(soak: SoakConfig) -> dict[str, Window]:
    """Return what is compared with what."""
    end_s, warm_up_s = soak.duration_s, WARM_UP_SHARE * soak.duration_s
    window_s, memory_s = WINDOW_SHARE * end_s, MEMORY_SHARE * end_s
    return {
        "first": Window(start_s=warm_up_s, end_s=warm_up_s + window_s),
        "last": Window(start_s=end_s - window_s, end_s=end_s),
        "first memory": Window(start_s=warm_up_s, end_s=warm_up_s + memory_s),
        "last memory": Window(start_s=end_s - memory_s, end_s=end_s),
    }


def compare_canaries(results: Sequence[CallResult]) -> tuple[int, list[dict[str, Any]]]:
    """Compare each answered canary with the first answer to the same call.

    Returns how many were compared, and those that differ. Calls that failed are errors already.
    """
    first: dict[str, CallResult] = {}
    num_compared, different = 0, []
    for result in results:
        call = result.call
        if not call.kind.startswith("canary ") or result.outcome is not Outcome.ANSWERED:
            continue
        if call.kind not in first:
            first[call.kind] = result
            continue
        num_compared += 1
        was = first[call.kind]
        if (result.texts, result.finish_reasons) != (was.texts, was.finish_reasons):
            different.append({"kind": call.kind, "at_s": result.started_s, "first": was.texts, "now": result.texts})
    return num_compared, different


def measured_times(results: Sequence[CallResult], kinds: Sequence[str]) -> list[tuple[float, float, float | None]]:
    """Return end (s), time to first token (ms) and time per token (ms) of each answered call of these kinds."""
    times = []
    for result in results:
        if result.outcome is Outcome.ANSWERED and result.call.kind in kinds and result.ttft_s is not None:
            assert result.ended_s is not None, result
            tpot_ms = None if result.tpot_s is None else round(1e3 * result.tpot_s, 3)
            times.append((round(result.ended_s, 2), round(1e3 * result.ttft_s, 2), tpot_ms))
    return times
