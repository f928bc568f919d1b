"""A load test: very many streams at once, of which some read slowly or hang up in the second half.

What is asked is that nothing but a clean "try again later" goes wrong, that no page and no memory is lost, and that
those who behave are served as fast in the second half as in the first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dspark.errors import ConfigError
from dspark.evaluation.http_call import Call, CallResult
from dspark.evaluation.server_process import rehearse, running_server, served_model
from dspark.evaluation.traffic import CHAT, STREAM
from dspark.evaluation.traffic_report import Check, Window, common_checks, common_report, latency, memory, ratio
from dspark.evaluation.traffic_run import Progress, Run, Session, TrafficConfig, Worker, run_clients

WARM_UP_SHARE = 0.2  # of the duration: every stream has begun
MEMORY_SHARE = 0.1
ODD_SHARE = 0.1  # of the clients read slowly, and as many hang up
ANSWER_TOKENS = 32  # at most, of those who behave
LEAVE_AFTER_EVENTS = 4
READ_PAUSE_S = 5.0
NUM_TOP_LOGPROBS = 20  # of slow readers: long events, so that buffers fill
MAX_SLOWER = 1.1
SERVER_FLAGS = ("--log-level", "warning", "--cache-tokens", "32768")
STEADY, HANGS_UP, SLOW = "steady stream", "hangs up", "reads slowly"


@dataclass(frozen=True, kw_only=True)
class LoadConfig(TrafficConfig):
    """How long and how hard; `seed` is that of the prompts."""

    min_duration_s: ClassVar[float] = 5.0

    duration_s: float = 120.0
    num_streams: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_streams < 3:
            raise ConfigError(f"num_streams ({self.num_streams}) must be at least 3, one of each kind; raise it")

    @property
    def num_odd(self) -> int:
        """Clients that read slowly, and those that hang up: so many of either."""
        return max(1, round(ODD_SHARE * self.num_streams))

    @property
    def num_steady(self) -> int:
        """Clients that behave all the time."""
        return self.num_streams - 2 * self.num_odd


def run_load(
    load: LoadConfig, serve_flags: Sequence[str], texts: Sequence[str], *, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Start a server with these flags of `dspark serve`, load it with streams about `texts`, end it, and report.

    Ctrl-C ends it early; the report is of what was measured so far.
    """
    with running_server([*SERVER_FLAGS, *serve_flags]) as server:
        progress(f"the server is ready at {server.url}")
        model, _ = served_model(server)
        rehearse(server, load.rehearsed_tokens)
        progress("all sizes of a pass have been run; the streams begin")
        run = run_clients(
            server,
            load_workers(load, model, texts),
            duration_s=load.duration_s,
            progress=progress,
            line_every_s=min(10.0, load.duration_s / 4),
        )
        exit_status = server.stop()
    return load_report(load, run, exit_status) | {"serve_flags": [*SERVER_FLAGS, *serve_flags]}


def load_workers(load: LoadConfig, model: str, texts: Sequence[str]) -> list[Worker]:
    """Return the clients."""
    rough_start_s = load_windows(load)["rough"].start_s
    kinds = [*[SLOW] * load.num_odd, *[HANGS_UP] * load.num_odd, *[STEADY] * load.num_steady]

    def worker_of(kind: str, seed: int) -> Worker:
        prompts = _prompts(model, texts, seed)

        async def worker(session: Session) -> None:
            for body in prompts:
                await session.call(load_call(kind, body, is_rough=session.elapsed_s >= rough_start_s))

        return worker

    return [worker_of(kind, load.seed + number) for number, kind in enumerate(kinds)]


def load_call(kind: str, body: dict[str, Any], *, is_rough: bool) -> Call:
    """Return a client's next call. In the calm half it asks for as much work as in the rough one, and behaves."""
    if kind == SLOW:
        body = {**body, "logprobs": True, "top_logprobs": NUM_TOP_LOGPROBS}
        return Call(kind=kind, path=CHAT, body=body, read_pause_s=READ_PAUSE_S if is_rough else 0.0)
    if kind == HANGS_UP:
        if is_rough:
            return Call(kind=kind, path=CHAT, body=body, leave_after_events=LEAVE_AFTER_EVENTS)
        return Call(kind=kind, path=CHAT, body={**body, "max_tokens": LEAVE_AFTER_EVENTS})
    return Call(kind=kind, path=CHAT, body=body)


def _prompts(model: str, texts: Sequence[str], seed: int) -> Iterator[dict[str, Any]]:
    chooser = random.Random(seed)
    while True:
        messages = [{"role": "user", "content": chooser.choice(texts)}]
        yield {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, **STREAM}


def load_windows(load: LoadConfig) -> dict[str, Window]:
    """Return the calm and the rough half after the warm-up, and what memory is compared of."""
    start_s, end_s, memory_s = WARM_UP_SHARE * load.duration_s, load.duration_s, MEMORY_SHARE * load.duration_s
    middle_s = (start_s + end_s) / 2
    return {
        "calm": Window(start_s=start_s, end_s=middle_s),
        "rough": Window(start_s=middle_s, end_s=end_s),
        "first memory": Window(start_s=start_s, end_s=start_s + memory_s),
        "last memory": Window(start_s=end_s - memory_s, end_s=end_s),
    }


def load_report(load: LoadConfig, run: Run, exit_status: int) -> dict[str, Any]:
    """Reduce a run to a report with the bounds that must hold."""
    windows = load_windows(load)
    halves = ("calm", "rough")
    steady = [result for result in run.results if result.call.kind == STEADY]
    pace_ms = {name: pace(steady, load.num_steady, windows[name]) for name in halves}
    used = memory(run.samples, windows["first memory"], windows["last memory"])
    most_running = max((sample.num_running for sample in run.samples), default=None)
    slower = ratio(pace_ms["rough"], pace_ms["calm"])
    checks = [
        *common_checks(run, exit_status, used["drift"]),
        Check(name="time per token of steady streams, rough per calm", value=slower, high=MAX_SLOWER),
    ]
    latencies = {
        name: {"ms_per_token_and_stream": pace_ms[name], **latency(run.results, (STEADY,), windows[name])}
        for name in halves
    }
    report = common_report("load", load, run, exit_status, windows=windows, checks=checks)
    return report | {"latency": latencies, "memory": used, "most_running": most_running}


def pace(results: Sequence[CallResult], num_streams: int, window: Window) -> float | None:
    """Return milliseconds per token and stream: how long a stream of these had to wait for a token in this window.

    Counts what arrived, of calls under way too, for with very many streams a call takes a good part of the window.
    Waiting for a first token is part of it.
    """
    num_tokens = 0
    for result in results:
        so_far = 0
        for at_s, num_so_far in result.arrivals:
            if window.holds(at_s):
                num_tokens += num_so_far - so_far
            so_far = num_so_far
    if not num_tokens:
        return None
    return round(1e3 * (window.end_s - window.start_s) * num_streams / num_tokens, 2)
