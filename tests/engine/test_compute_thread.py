"""The thread that computes: order, errors, calls that are left behind, its end."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from dspark.engine.compute_thread import ComputeThread, ComputeTimeout


def test_all_calls_run_in_one_thread_that_is_not_the_callers() -> None:
    thread = ComputeThread()

    names = {thread.run(threading.get_ident) for _ in range(5)}

    assert len(names) == 1
    assert names != {threading.get_ident()}


def test_a_result_and_an_error_reach_the_caller() -> None:
    thread = ComputeThread()

    assert thread.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 // 0)
    assert thread.run(lambda: 8) == 8


def test_a_timeout_that_the_call_itself_raises_is_passed_on() -> None:
    def call() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        ComputeThread().run(call, timeout_s=5.0)


def test_a_call_from_within_runs_at_once() -> None:
    thread = ComputeThread()

    assert thread.run(lambda: thread.run(lambda: 3)) == 3


def test_a_call_that_hangs_is_left_behind_and_later_ones_go_on() -> None:
    thread, release = ComputeThread(), threading.Event()

    with pytest.raises(ComputeTimeout) as caught:
        thread.run(release.wait, timeout_s=0.02)

    assert not caught.value.call.done()
    assert thread.run(lambda: "on") == "on"
    release.set()
    assert caught.value.call.result(timeout=5.0) is True


def test_calls_from_several_threads_do_not_overlap() -> None:
    thread = ComputeThread()
    running, most = [], []

    def call() -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0.001)
        running.pop()

    callers = [threading.Thread(target=lambda: [thread.run(call) for _ in range(10)]) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    assert most == [1] * 40


def test_the_thread_ends_with_its_owner() -> None:
    owner = ComputeThread()
    worker = owner.run(threading.current_thread)
    del owner
    gc.collect()

    worker.join(timeout=5.0)

    assert not worker.is_alive()
