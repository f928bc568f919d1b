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


def test_a_call_whose_turn_does_not_come_is_never_made() -> None:
    thread, release, made = ComputeThread(), threading.Event(), []
    busy = threading.Thread(target=lambda: thread.run(release.wait))
    busy.start()

    with pytest.raises(ComputeTimeout) as caught:
        thread.run(lambda: made.append(1), timeout_s=0.05)
    release.set()
    busy.join(timeout=5.0)

    assert caught.value.call is None
    assert thread.run(lambda: list(made)) == []


def test_what_waits_behind_a_call_that_hangs_gets_the_new_thread() -> None:
    thread, release, results = ComputeThread(), threading.Event(), []

    def hang() -> None:
        with pytest.raises(ComputeTimeout):
            thread.run(release.wait, timeout_s=0.2)

    hanging = threading.Thread(target=hang)
    hanging.start()
    time.sleep(0.05)
    waiting = threading.Thread(target=lambda: results.append(thread.run(lambda: "served")))
    waiting.start()
    waiting.join(timeout=5.0)
    hanging.join(timeout=5.0)

    assert results == ["served"]
    release.set()


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
