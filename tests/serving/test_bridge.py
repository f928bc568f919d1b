"""The engine's thread: delivery, clients that leave, faults and the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from fake_engine import FakeEngine, says

from dspark.errors import RequestError
from dspark.request import FinishReason, Request, RequestOutput, SamplingParams
from dspark.serving.bridge import MAX_FAILURES_IN_A_ROW, EngineBridge, EngineFailure


def request(request_id: str = "r", *, max_tokens: int = 30) -> Request:
    return Request(request_id=request_id, prompt_token_ids=[65], sampling=SamplingParams(max_tokens=max_tokens))


def with_bridge(engine: FakeEngine, test: Callable[[EngineBridge], Coroutine[Any, Any, None]]) -> None:
    """Run `test` with a started bridge and shut it down."""

    async def main() -> None:
        bridge = EngineBridge(engine)  # type: ignore[arg-type]
        bridge.start()
        try:
            await asyncio.wait_for(test(bridge), timeout=20)
        finally:
            engine.gate.set()
            await bridge.shutdown(timeout_s=0)

    asyncio.run(main())


async def text_of(bridge: EngineBridge, *requests: Request) -> str:
    return "".join([output.text async for output in bridge.submit(requests)])


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.002)


def test_outputs_arrive_in_order_and_the_stream_ends() -> None:
    async def test(bridge: EngineBridge) -> None:
        outputs = [output async for output in bridge.submit([request(max_tokens=8)])]
        assert [output.text for output in outputs] == ["abc", "def", "gh"]
        assert outputs[-1].finish_reason is FinishReason.LENGTH

    with_bridge(FakeEngine(), test)


def test_requests_submitted_together_share_a_stream() -> None:
    async def test(bridge: EngineBridge) -> None:
        outputs = [o async for o in bridge.submit([request("a", max_tokens=2), request("b", max_tokens=4)])]
        assert [(o.request_id, o.text) for o in outputs] == [("a", "ab"), ("b", "abc"), ("b", "d")]

    with_bridge(FakeEngine(), test)


def test_engine_is_used_from_one_thread_that_is_not_the_event_loops() -> None:
    engine = FakeEngine()

    async def test(bridge: EngineBridge) -> None:
        await asyncio.gather(*(text_of(bridge, request(str(i))) for i in range(4)))
        stream = bridge.submit([request("left", max_tokens=60)])
        await anext(stream)
        stream.close()
        await until(lambda: engine.aborted_ids == ["left"])

    with_bridge(engine, test)
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_outputs_of_one_step_wake_the_event_loop_once() -> None:
    engine = FakeEngine()

    async def test(bridge: EngineBridge) -> None:
        engine.gate.clear()
        streams = [bridge.submit([request(str(i), max_tokens=3)]) for i in range(8)]
        await until(lambda: engine.num_steps == 1)  # holds the first request; the others wait in the queue
        loop, calls = asyncio.get_running_loop(), []
        original = loop.call_soon_threadsafe

        def counted(callback: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(callback)
            return original(callback, *args, **kwargs)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        engine.gate.set()
        for stream in streams:
            assert [output.text async for output in stream] == ["abc"]
        assert len(calls) == engine.num_steps <= 2

    with_bridge(engine, test)


def test_idle_thread_does_not_spin() -> None:
    engine = FakeEngine()

    async def test(bridge: EngineBridge) -> None:
        await text_of(bridge, request())
        num_steps, cpu_s = engine.num_steps, time.process_time()
        await asyncio.sleep(0.3)
        assert engine.num_steps == num_steps
        assert time.process_time() - cpu_s < 0.1

    with_bridge(engine, test)


def test_slow_reader_does_not_hold_up_the_engine() -> None:
    engine = FakeEngine(max_model_len=1000)

    async def test(bridge: EngineBridge) -> None:
        stream = bridge.submit([request("slow", max_tokens=900)])
        await until(lambda: engine.num_running == 0 and engine.num_steps >= 300)
        assert len("".join([output.text async for output in stream])) == 900

    with_bridge(engine, test)


# -- clients that leave ------------------------------------------------------------------------------------


async def leave_by_closing(bridge: EngineBridge) -> None:
    stream = bridge.submit([request("left", max_tokens=60)])
    await anext(stream)
    await anext(stream)
    stream.close()


async def leave_by_cancellation(bridge: EngineBridge) -> None:
    async def read() -> None:
        stream = bridge.submit([request("left", max_tokens=60)])
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()

    task = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("leave", [leave_by_closing, leave_by_cancellation])
def test_request_of_a_client_that_left_ends_within_two_steps(
    leave: Callable[[EngineBridge], Awaitable[None]],
) -> None:
    engine = FakeEngine(max_model_len=10_000, step_s=0.05)

    async def test(bridge: EngineBridge) -> None:
        await leave(bridge)
        num_steps = engine.num_steps
        await until(lambda: not engine.has_unfinished())
        assert engine.num_steps - num_steps <= 2
        assert engine.aborted_ids == ["left"]
        assert await text_of(bridge, request("next", max_tokens=5)) == "abcde"

    with_bridge(engine, test)


def test_leaving_ends_only_what_still_runs() -> None:
    engine = FakeEngine(step_s=0.01)

    async def test(bridge: EngineBridge) -> None:
        stream = bridge.submit([request("short", max_tokens=1), request("long", max_tokens=60)])
        await anext(stream)
        stream.close()
        stream.close()
        await until(lambda: engine.aborted_ids == ["long"])

    with_bridge(engine, test)


# -- faults ------------------------------------------------------------------------------------------------


def test_failing_step_ends_the_open_requests_and_the_next_ones_work() -> None:
    engine = FakeEngine(step_s=0.01)

    async def test(bridge: EngineBridge) -> None:
        streams = [bridge.submit([request(name, max_tokens=60)]) for name in "ab"]
        for stream in streams:
            await anext(stream)
        engine.num_failing_steps = 1
        for stream in streams:
            with pytest.raises(EngineFailure, match="the scripted fault"):
                while True:
                    await anext(stream)
        assert await text_of(bridge, request("next", max_tokens=5)) == "abcde"
        assert bridge.health == "ok"
        assert engine.num_running == 0

    with_bridge(engine, test)


def test_repeated_failures_make_the_server_unhealthy_until_a_request_succeeds() -> None:
    engine = FakeEngine()

    async def test(bridge: EngineBridge) -> None:
        engine.num_failing_steps = 10**6
        for number in range(MAX_FAILURES_IN_A_ROW):
            assert bridge.health == "ok"
            with pytest.raises(EngineFailure):
                await text_of(bridge, request(str(number)))
        assert bridge.health == "failed"
        engine.num_failing_steps = 0
        assert await text_of(bridge, request("good", max_tokens=3)) == "abc"
        assert bridge.health == "ok"

    with_bridge(engine, test)


def test_step_that_fails_for_ever_does_not_spin() -> None:
    engine = FakeEngine()

    async def test(bridge: EngineBridge) -> None:
        engine.num_failing_steps = 10**6
        with pytest.raises(EngineFailure):
            await text_of(bridge, request())
        await asyncio.sleep(0.5)
        assert engine.num_steps < 10  # the aborted request's last output is still to be had

    with_bridge(engine, test)


def test_request_the_engine_refuses_after_all_is_answered() -> None:
    engine = FakeEngine()

    async def test(bridge: EngineBridge) -> None:
        with pytest.raises(EngineFailure, match="prompt is empty"):
            await text_of(bridge, Request(request_id="r", prompt_token_ids=[]))
        assert await text_of(bridge, request("next", max_tokens=3)) == "abc"

    with_bridge(engine, test)


def test_dying_thread_answers_everybody_and_takes_nobody_else() -> None:
    class Doomed(FakeEngine):
        def step(self) -> list[RequestOutput]:
            raise SystemExit("no way on")

    async def test(bridge: EngineBridge) -> None:
        with pytest.raises(EngineFailure, match="no way on"):
            await text_of(bridge, request())
        assert bridge.health == "failed"
        with pytest.raises(RequestError) as caught:
            bridge.submit([request("next")])
        assert caught.value.status == 503

    with_bridge(Doomed(), test)


# -- the end -----------------------------------------------------------------------------------------------


def test_shutdown_lets_running_requests_end_and_refuses_new_ones() -> None:
    engine = FakeEngine(says("hello world"), step_s=0.01)

    async def test(bridge: EngineBridge) -> None:
        stream = bridge.submit([request()])
        shutdown = asyncio.create_task(bridge.shutdown(timeout_s=10))
        await asyncio.sleep(0)
        assert bridge.health == "draining"
        with pytest.raises(RequestError, match="draining") as caught:
            bridge.submit([request("late")])
        assert caught.value.status == 503
        outputs = [output async for output in stream]
        assert "".join(output.text for output in outputs) == "hello world"
        assert outputs[-1].finish_reason is FinishReason.STOP
        await shutdown
        assert bridge.health == "stopped"

    with_bridge(engine, test)
    assert engine.aborted_ids == []


def test_shutdown_aborts_what_does_not_end_in_time() -> None:
    engine = FakeEngine(max_model_len=10**6, step_s=0.005)

    async def test(bridge: EngineBridge) -> None:
        stream = bridge.submit([request(max_tokens=10**5)])
        await anext(stream)
        await bridge.shutdown(timeout_s=0.05)
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason is FinishReason.ABORT

    with_bridge(engine, test)
    assert engine.aborted_ids == ["r"]


def test_second_shutdown_cuts_the_wait_short() -> None:
    engine = FakeEngine(max_model_len=10**6, step_s=0.005)

    async def test(bridge: EngineBridge) -> None:
        stream = bridge.submit([request(max_tokens=10**5)])
        await anext(stream)
        patient = asyncio.create_task(bridge.shutdown(timeout_s=1000))
        await asyncio.sleep(0.02)
        await bridge.shutdown(timeout_s=0)
        await patient

    with_bridge(engine, test)


def test_bridge_that_was_never_started_refuses_and_shuts_down() -> None:
    async def main() -> None:
        bridge = EngineBridge(FakeEngine())  # type: ignore[arg-type]
        assert bridge.health == "starting"
        with pytest.raises(RequestError):
            bridge.submit([request()])
        await bridge.shutdown(timeout_s=1)

    asyncio.run(main())


# -- calls between steps -----------------------------------------------------------------------------------


def test_a_call_between_steps_is_made_in_the_engines_thread() -> None:
    engine = FakeEngine()

    async def test(bridge: EngineBridge) -> None:
        await text_of(bridge, request())
        assert await bridge.between_steps(threading.get_ident, timeout_s=10) in engine.threads
        with pytest.raises(ZeroDivisionError):
            await bridge.between_steps(lambda: 1 // 0, timeout_s=10)
        assert await text_of(bridge, request("next", max_tokens=3)) == "abc"
        await bridge.shutdown(timeout_s=1)
        assert await bridge.between_steps(threading.get_ident, timeout_s=10) == threading.get_ident()

    with_bridge(engine, test)


def test_a_call_whose_turn_does_not_come_in_time_is_never_made() -> None:
    engine = FakeEngine()
    calls: list[int] = []

    async def test(bridge: EngineBridge) -> None:
        engine.gate.clear()
        stream = bridge.submit([request(max_tokens=3)])
        await until(lambda: engine.num_steps == 1)
        with pytest.raises(TimeoutError):
            await bridge.between_steps(lambda: calls.append(1), timeout_s=0.05)
        engine.gate.set()
        assert [output.text async for output in stream] == ["abc"]
        await bridge.between_steps(lambda: calls.append(2), timeout_s=10)
        assert calls == [2]

    with_bridge(engine, test)
