"""One thread for all tensor work of a model, and a way to go on when a call in it never comes back.

OpenMP keeps a team of workers for each thread that ever computed, and throttles them all once there are more of them
than cores: loading in one thread and decoding in another costs a quarter of the speed on a small machine.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "Future[Any]"]


class ComputeTimeout(Exception):
    """A call took too long. `call` is set if it was left behind; it is done when it comes back after all."""

    def __init__(self, seconds: float, call: Future[Any] | None = None) -> None:
        super().__init__(f"it took {seconds:.3g} s" if call is None else f"no answer within {seconds:.3g} s")
        self.call = call


class ComputeThread:
    """Runs calls one after the other in a thread of its own. For callers from any thread.

    The thread starts with the first call, is replaced when a call is left behind, and ends with this object. It is a
    daemon: a call that never comes back does not keep the process alive.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, call: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Return what `call` returns, or raise what it raises.

        With a timeout, raise `ComputeTimeout` when it takes longer: the call goes on in the old thread, others get a
        new one, and what the old one still does must not matter. A call whose turn has not come by then is never made,
        and the thread stays. A call made from within the thread runs at once.
        """
        if threading.current_thread() is self._thread:
            return call()
        future: Future[T] = Future()
        with self._lock:
            jobs = self._started()
            jobs.put((call, future))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if timeout_s is None or future.done():  # the call itself raised it, or came back just now
                return future.result()
            if future.cancel():
                raise ComputeTimeout(timeout_s) from None
            with self._lock:
                if self._jobs is jobs:  # nobody else has replaced it
                    self._replace()
            raise ComputeTimeout(timeout_s, future) from None

    def _replace(self) -> None:
        """Leave the thread to its call; what waits behind that call goes to a new thread."""
        old, self._jobs, self._thread = self._jobs, None, None
        assert old is not None
        with contextlib.suppress(queue.Empty):
            while (job := old.get_nowait()) is not None:
                self._started().put(job)
        old.put(None)

    def _started(self) -> queue.SimpleQueue[_Job | None]:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="compute", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        return self._jobs


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        call, future = job
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # the caller's to handle, whatever it is
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del job, call, future  # nothing of a call outlives it while the thread waits for the next
