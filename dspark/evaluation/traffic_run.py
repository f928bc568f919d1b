"""Clients that use a server for some time while its metrics are watched; then it must come to rest."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dspark.errors import ConfigError, DsparkError
from dspark.evaluation.http_call import Call, CallResult, Outcome, perform
from dspark.evaluation.server_process import CALL_TIMEOUT_S, REHEARSED_TOKENS, ServerProcess

SAMPLE_INTERVAL_S = 1.0
REST_TIMEOUT_S = 30.0  # until nothing runs any more after the last client has gone
REST_POLL_S = 0.1
FAILED_PAUSE_S = 0.5  # a client whose call failed waits so long, lest a dead server is asked all the time
MAX_RETRY_PAUSE_S = 5.0
SLOW_RECEIVE_BYTES = 4096  # socket buffer of clients that read slowly

_METRICS = {
    "process_resident_memory_bytes": "memory_bytes",
    "process_open_fds": "num_open_files",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:generation_tokens_total": "num_tokens",
    "dspark:drafter_failures_total": "num_drafter_failures",
    "dspark:breaker_changes_total": "num_breaker_changes",
}


@dataclass(frozen=True, kw_only=True)
class TrafficConfig:
    """What a load test and a soak have in common."""

    min_duration_s: ClassVar[float]

    duration_s: float
    seed: int = 0
    rehearsed_tokens: int = REHEARSED_TOKENS  # before the clients begin: a pass of each size up to this

    def __post_init__(self) -> None:
        if not self.min_duration_s <= self.duration_s < float("inf"):
            raise ConfigError(f"duration_s ({self.duration_s}) must be at least {self.min_duration_s:g}; raise it")
        if self.rehearsed_tokens < 0:
            raise ConfigError(f"rehearsed_tokens ({self.rehearsed_tokens}) must not be negative; 0 rehearses nothing")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What /metrics says at a time, in seconds since the clients began."""

    at_s: float
    memory_bytes: float
    num_open_files: float
    kv_cache_usage: float
    num_running: float
    num_waiting: float
    num_tokens: float
    num_drafter_failures: float
    num_breaker_changes: float

    @classmethod
    def parse(cls, text: str, at_s: float) -> Sample:
        """Read what /metrics answers; raises `DsparkError` where it does not tell the server's memory."""
        values = dict.fromkeys(_METRICS.values(), 0.0)
        seen = set()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in _METRICS:
                    values[_METRICS[sample.name]] += sample.value
                    seen.add(sample.name)
        if "process_resident_memory_bytes" not in seen:
            raise DsparkError("/metrics does not tell the server's memory; measure on a system with /proc")
        return cls(at_s=at_s, **values)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing runs or waits and no page is in use."""
        return not (self.num_running or self.num_waiting or self.kv_cache_usage)


@dataclass(kw_only=True)
class Run:
    """What clients saw and what the server said of itself meanwhile. Times are seconds since the clients began."""

    results: list[CallResult]  # their times are relative, too
    samples: list[Sample]
    before: Sample
    after: Sample  # when it rests, or no longer is waited for
    duration_s: float
    is_interrupted: bool  # by Ctrl-C, or because the server ended


class Session:
    """What clients make calls with; keeps all results."""

    def __init__(self, client: httpx.AsyncClient, slow_client: httpx.AsyncClient) -> None:
        self.results: list[CallResult] = []
        self.start_s = time.monotonic()
        self._client, self._slow_client = client, slow_client

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clients began."""
        return time.monotonic() - self.start_s

    async def call(self, call: Call) -> CallResult:
        """Make a call and, after a failed or refused one, wait as a client should before its next."""
        result = CallResult(call=call)
        self.results.append(result)
        await perform(self._slow_client if call.read_pause_s else self._client, result)
        if result.outcome is Outcome.FAILED:
            await asyncio.sleep(FAILED_PAUSE_S)
        elif result.outcome is Outcome.OVERLOADED:
            await asyncio.sleep(min(result.retry_after_s, MAX_RETRY_PAUSE_S))
        return result

    async def switch_speculation(self, is_on: bool, admin_key: str) -> None:
        """Let the server draft or not; errors show in the calls of others."""
        headers = {"authorization": f"Bearer {admin_key}"}
        with contextlib.suppress(httpx.HTTPError):
            await self._client.post("/admin/speculation", json={"enabled": is_on}, headers=headers)


Worker = Callable[[Session], Awaitable[None]]  # a client; goes on until it is cancelled
Progress = Callable[[str], None]


def run_clients(
    server: ServerProcess, workers: Sequence[Worker], *, duration_s: float, progress: Progress, line_every_s: float
) -> Run:
    """Let `workers` use the server for so long, or until Ctrl-C or its end. `progress` gets a line now and then.

    In the end calls under way are cut off, as by clients that leave, and the server gets time to come to rest.
    """
    return asyncio.run(_Driver(server, progress, line_every_s).run(workers, duration_s))


class _Driver:
    def __init__(self, server: ServerProcess, progress: Progress, line_every_s: float) -> None:
        self._server, self._progress, self._line_every_s = server, progress, line_every_s
        self._samples: list[Sample] = []

    async def run(self, workers: Sequence[Worker], duration_s: float) -> Run:
        with _stop_signal() as stop:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            slow_transport = httpx.AsyncHTTPTransport(
                limits=limits, socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_RECEIVE_BYTES)]
            )
            url, timeout = self._server.url, CALL_TIMEOUT_S
            async with (
                httpx.AsyncClient(base_url=url, timeout=timeout) as watcher,
                httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client,
                httpx.AsyncClient(base_url=url, timeout=timeout, transport=slow_transport) as slow_client,
            ):
                before = await self._sample(watcher, 0.0)
                session = Session(client, slow_client)
                tasks = [asyncio.create_task(_forever(worker, session)) for worker in workers]
                tasks.append(asyncio.create_task(self._watch(watcher, session, stop)))
                try:
                    await asyncio.wait(tasks, timeout=duration_s, return_when=asyncio.FIRST_COMPLETED)
                    elapsed_s = session.elapsed_s
                finally:
                    await _cancel(tasks)
            # The clients have closed their connections; what is asked now comes over new ones.
            async with httpx.AsyncClient(base_url=url, timeout=timeout) as watcher:
                after = await self._rest(watcher, session, before)
        return Run(
            results=[_relative(result, session.start_s) for result in session.results],
            samples=self._samples,
            before=before,
            after=after,
            duration_s=elapsed_s,
            is_interrupted=stop.is_set(),
        )

    async def _sample(self, client: httpx.AsyncClient, at_s: float) -> Sample:
        return Sample.parse((await client.get("/metrics")).text, at_s)

    async def _watch(self, client: httpx.AsyncClient, session: Session, stop: asyncio.Event) -> None:
        """Look at the server now and then; return when it has ended, or Ctrl-C is pressed."""
        next_line_s = self._line_every_s
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), SAMPLE_INTERVAL_S)
            if self._server.process.poll() is not None:
                self._progress(f"the server ended with status {self._server.process.returncode}")
                stop.set()
                break
            with contextlib.suppress(httpx.HTTPError):  # shows in the calls of the clients
                self._samples.append(await self._sample(client, session.elapsed_s))
            if session.elapsed_s >= next_line_s and self._samples:
                self._progress(_line(session, self._samples))
                next_line_s += self._line_every_s

    async def _rest(self, client: httpx.AsyncClient, session: Session, before: Sample) -> Sample:
        """Return the server's state when it has come to rest, or the last one known."""
        deadline = time.monotonic() + REST_TIMEOUT_S
        latest = self._samples[-1] if self._samples else None
        while time.monotonic() < deadline and self._server.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                latest = await self._sample(client, session.elapsed_s)
                if latest.is_at_rest and latest.num_open_files <= before.num_open_files:
                    break
            await asyncio.sleep(REST_POLL_S)
        if latest is None:
            raise DsparkError(
                f"the server ended before anything was measured; its log says:\n{self._server.log_tail()}"
            )
        return latest


async def _forever(worker: Worker, session: Session) -> None:
    await worker(session)
    raise AssertionError("a client came to an end")


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel all tasks and raise what one of them raised before."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


@contextlib.contextmanager
def _stop_signal() -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; the second one acts as usual."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _relative(result: CallResult, start_s: float) -> CallResult:
    result.started_s -= start_s
    result.ended_s = None if result.ended_s is None else result.ended_s - start_s
    result.arrivals = [(at_s - start_s, num_tokens) for at_s, num_tokens in result.arrivals]
    return result


def _line(session: Session, samples: Sequence[Sample]) -> str:
    last = samples[-1]
    earlier = samples[max(0, len(samples) - 1 - 10)]
    seconds = max(last.at_s - earlier.at_s, SAMPLE_INTERVAL_S)
    count = dict.fromkeys(Outcome, 0)
    for result in session.results:
        count[result.outcome] += 1
    return (
        f"{session.elapsed_s:5.0f} s: {count[Outcome.ANSWERED]} answered, {count[Outcome.LEFT]} left, "
        f"{count[Outcome.REFUSED]} refused, {count[Outcome.OVERLOADED]} overloaded, {count[Outcome.FAILED]} failed; "
        f"{last.num_running:.0f} running, {last.num_waiting:.0f} waiting, "
        f"{(last.num_tokens - earlier.num_tokens) / seconds:.0f} tokens/s, {last.memory_bytes / 2**20:.0f} MiB"
    )
