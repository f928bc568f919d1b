"""The engine's thread and the event loop: requests go in, outputs come out, and neither side waits for the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, TypeVar

from dspark.errors import RequestError
from dspark.request import FinishReason, Request, RequestOutput

if TYPE_CHECKING:
    from dspark.engine.engine import Engine

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 3  # failed steps without an output between them, after which the server is not healthy
MAX_RETRY_DELAY_S = 1.0
THREAD_STOP_TIMEOUT_S = 10.0  # a step under way is waited for this long

T = TypeVar("T")

Health = Literal["ok", "starting", "draining", "failed", "stopped"]


class EngineFailure(RuntimeError):
    """The engine could not go on with a request that it had taken."""


class OutputStream:
    """Outputs of the requests of one call, in the order the engine made them; ends when all have ended.

    Raises `EngineFailure` when one ends with an error. Close it when the reader goes away early: what still runs
    is aborted. For one task of the event loop.
    """

    def __init__(self, bridge: EngineBridge, request_ids: Iterable[str]) -> None:
        self._bridge = bridge
        self._open_ids = set(request_ids)
        # Unbounded, so that a slow reader never holds up the engine; max_tokens bounds what can pile up.
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._open_ids:
            raise StopAsyncIteration
        output = await self._outputs.get()
        if output.finish_reason is not None:
            self._open_ids.discard(output.request_id)
        if output.error_param is not None:
            raise RequestError(output.error or "the request cannot go on", param=output.error_param)
        if output.finish_reason is FinishReason.ERROR:
            raise EngineFailure(output.error or "the engine failed")
        return output

    def put(self, output: RequestOutput) -> None:
        """Add an output; the bridge calls this on the event loop."""
        self._outputs.put_nowait(output)

    def close(self) -> None:
        """Abort the requests that have not ended; harmless when all have."""
        self._bridge.forget(self._open_ids)
        self._open_ids = set()


class EngineBridge:
    """Runs an engine in a thread of its own and serves its outputs to one event loop.

    The engine is touched only by that thread, but for `validate` and what never changes (names, tokenizer).
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: stop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        # On the event loop:
        self._streams: dict[str, OutputStream] = {}
        self.wants_speculation = True  # what was asked for last
        self._is_draining = False
        self._has_ended = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        # On the engine's thread:
        self._running_ids: set[str] = set()
        self._num_failures = 0

    # -- the event loop's side -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread; outputs go to the running event loop. Harmless when started before."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()

    @property
    def health(self) -> Health:
        """What the server can do now; only "ok" is good."""
        if self._loop is None:
            return "starting"
        if self._is_draining:
            return "stopped" if self._has_ended else "draining"
        return "failed" if self._has_ended or self._num_failures >= MAX_FAILURES_IN_A_ROW else "ok"

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Hand validated requests to the engine and return the stream of their outputs.

        Raises `RequestError` with status 503 when none are taken any more.
        """
        if self._loop is None or self._is_draining or self._has_ended:
            raise RequestError(
                f"the server takes no requests ({self.health}); try again or elsewhere", code="unavailable", status=503
            )
        stream = OutputStream(self, (request.request_id for request in requests))
        self._streams |= {request.request_id: stream for request in requests}
        self._is_idle.clear()
        self._commands.put(lambda: self._add(requests))
        return stream

    def forget(self, request_ids: Iterable[str]) -> None:
        """Abort requests nobody waits for any more; ids that have ended are harmless."""
        open_ids = [request_id for request_id in request_ids if self._streams.pop(request_id, None) is not None]
        if open_ids:
            self._commands.put(lambda: self._abort(open_ids))
            self._update_idle()

    def switch_speculation(self, is_on: bool) -> None:
        """Let the engine draft, or decode plainly, from its next step on."""
        self.wants_speculation = is_on
        self._commands.put(lambda: self.engine.switch_speculation(is_on))

    def reset_learned(self) -> None:
        """Let the engine forget what it learned online, before its next step."""
        self._commands.put(self.engine.reset_learned)

    async def between_steps(self, call: Callable[[], T], *, timeout_s: float) -> T:
        """Return what a short `call` returns in the engine's thread between two steps, or raise what it raises.

        Once that thread has ended the call is made here. Raises `TimeoutError` when its turn does not come in time.
        """
        if self._loop is not None and not self._thread.is_alive():
            return call()
        future: Future[T] = Future()
        self._commands.put(lambda: _complete(future, call))
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)

    async def shutdown(self, timeout_s: float) -> None:
        """Take no more requests, let the running ones end for `timeout_s` seconds, abort the rest, stop the thread.

        Aborted requests end with finish reason "abort" and keep what they have. May be called again, also while
        a call is under way, to cut its timeout short.
        """
        self._is_draining = True
        if self._loop is None:
            return
        if not await self._wait_idle(timeout_s):
            logger.warning("%d requests that still ran are aborted", len(self._streams))
            open_ids = list(self._streams)
            self._commands.put(lambda: self._abort(open_ids))
            await self._wait_idle(THREAD_STOP_TIMEOUT_S)
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, THREAD_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the engine's thread is stuck in a step and is left behind")

    async def _wait_idle(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        return self._is_idle.is_set()

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # its reader has gone
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.put(output)
        self._update_idle()

    def _end_streams(self, error: str | None) -> None:
        """Answer everybody who still waits when the engine's thread has ended."""
        self._has_ended = True
        self._deliver([_last_output(request_id, error) for request_id in self._streams])

    def _update_idle(self) -> None:
        if not self._streams:
            self._is_idle.set()

    # -- the engine thread's side --------------------------------------------------------------------------

    def _run(self) -> None:
        error = None
        try:
            while self._take_commands():
                self._step()
        except BaseException as failure:  # whatever it is, those who wait must hear of it
            logger.exception("the engine's thread died")
            error = f"the engine failed: {failure}"
        self._call_loop(lambda: self._end_streams(error))

    def _take_commands(self) -> bool:
        """Carry out what was asked, waiting only when there is nothing else to do. False: stop."""
        try:
            while True:
                command = self._commands.get(timeout=self._wait_s())
                if command is None:
                    return False
                command()
        except queue.Empty:
            return True

    def _wait_s(self) -> float | None:
        """How long to wait for a command: for ever without work, a moment after a failure, else as the engine says."""
        if not self.engine.has_unfinished():
            return None
        if self._num_failures:
            return min(MAX_RETRY_DELAY_S, 0.01 * 4**self._num_failures)
        return self.engine.wait_s

    def _step(self) -> None:
        if not self.engine.has_unfinished():
            return
        try:
            outputs = self.engine.step()
        except Exception as error:
            logger.exception("an engine step failed; its requests end with an error")
            self._num_failures += 1
            self._give_up_all(f"the engine failed: {error}")
            return
        if not self._running_ids.isdisjoint(output.request_id for output in outputs):
            self._num_failures = 0
        self._send(outputs)

    def _send(self, outputs: Sequence[RequestOutput]) -> None:
        """Wake the event loop once for all `outputs`."""
        self._running_ids.difference_update(o.request_id for o in outputs if o.finish_reason is not None)
        if outputs:
            self._call_loop(lambda: self._deliver(outputs))

    def _call_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop was closed without a shutdown: nobody is left to read
            self._commands.put(None)

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._running_ids.add(request.request_id)
            try:
                self.engine.add_request(request)
            except Exception as error:
                logger.exception("request %s was not taken", request.request_id)
                self._send([_last_output(request.request_id, str(error))])

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            try:
                self.engine.abort(request_id)
            except Exception:
                logger.exception("request %s could not be aborted", request_id)

    def _give_up_all(self, error: str) -> None:
        """End every request with `error` and take them all out of the engine, so that new ones can go on."""
        request_ids = list(self._running_ids)
        self._send([_last_output(request_id, error) for request_id in request_ids])
        self._abort(request_ids)


def _complete(future: Future[T], call: Callable[[], T]) -> None:
    """Make `call` for a future, unless nobody waits for it any more."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)


def _last_output(request_id: str, error: str | None) -> RequestOutput:
    reason = FinishReason.ABORT if error is None else FinishReason.ERROR
    return RequestOutput(request_id=request_id, finish_reason=reason, error=error)
