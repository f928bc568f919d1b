"""One call over HTTP: what came of it, against answers that a server might give."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dspark.evaluation.http_call import Call, CallResult, Outcome, perform

BODY = {"model": "toy", "prompt": "hi", "max_tokens": 4}
STREAM = {**BODY, "stream": True}
USAGE = {"completion_tokens": 3}


def result_of(call: Call, respond: Callable[[httpx.Request], httpx.Response]) -> CallResult:
    async def main() -> CallResult:
        result = CallResult(call=call)
        async with httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://test") as client:
            await perform(client, result)
        return result

    return asyncio.run(main())


def answered(status: int, content: Any, headers: dict[str, str] | None = None, **fields: Any) -> CallResult:
    text = content if isinstance(content, str) else json.dumps(content)
    call = Call(**{"kind": "x", "path": "/v1/completions", "body": BODY, **fields})
    return result_of(call, lambda _: httpx.Response(status, text=text, headers=headers))


def streamed(*events: Any, **fields: Any) -> CallResult:
    text = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    return answered(200, text, **{"body": STREAM, **fields})


def chunk(text: str, num_tokens: int, finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": {"completion_tokens": num_tokens}}


def whole(text: str = "abc", finish_reason: str = "length", usage: Any = USAGE) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": usage}


def test_a_whole_answer_and_a_stream_are_read_alike() -> None:
    one = answered(200, whole())
    other = streamed(chunk("a", 1), chunk("bc", 3, "length"), "[DONE]")
    for result in (one, other):
        assert (result.outcome, result.texts, result.num_tokens) == (Outcome.ANSWERED, {0: "abc"}, 3)
    assert [num_tokens for _, num_tokens in other.arrivals] == [1, 3]


def test_times_follow_from_the_events_and_the_tokens_so_far() -> None:
    result = CallResult(call=Call(kind="x", path="/"), started_s=2.0, arrivals=[(2.5, 1), (2.7, 3), (3.5, 5)])
    assert (result.ttft_s, result.tpot_s) == (0.5, 0.25)
    assert CallResult(call=Call(kind="x", path="/"), arrivals=[(2.5, 1)]).tpot_s is None


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([chunk("a", 1)], "a stream without [DONE]"),
        ([chunk("a", 1), "[DONE]"], "choices without an end"),
        ([chunk("a", 1, "length"), "[DONE]", chunk("b", 2)], "an event after [DONE]"),
        ([{"error": {"message": "the engine failed"}}, "[DONE]"], "an error in a stream"),
        ([chunk("a", 1, "abort"), "[DONE]"], "finish reason abort"),
        ([chunk("a", 5, "length"), "[DONE]"], "more or fewer tokens than asked for"),
        (["{", "[DONE]"], "an answer that is not JSON"),
        ([{"id": 1}, "[DONE]"], "an answer of another shape"),
    ],
)
def test_a_stream_that_is_not_right_is_a_failure(events: list[Any], problem: str) -> None:
    result = streamed(*events)
    assert (result.outcome, result.problem) == (Outcome.FAILED, problem)


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (500, {"error": {"message": "x"}}, "status 500"),
        (400, {"error": {"message": "x"}}, "status 400"),
        (200, whole(usage=None), "an answer without usage"),
        (200, "oops", "an answer that is not JSON"),
        (429, {"error": {"message": "x"}}, "status 429 without Retry-After"),
        (503, {}, "status 503 without an error message"),
    ],
)
def test_an_answer_that_is_not_right_is_a_failure(status: int, body: Any, problem: str) -> None:
    result = answered(status, body)
    assert (result.outcome, result.problem) == (Outcome.FAILED, problem)


def test_a_stop_string_in_the_text_is_a_failure() -> None:
    assert answered(200, whole("a.b"), body={**BODY, "stop": ["."]}).problem == "a stop string in the text"


def test_an_overload_that_says_when_to_come_back_is_none() -> None:
    result = answered(429, {"error": {"message": "later"}}, headers={"retry-after": "7"})
    assert (result.outcome, result.retry_after_s) == (Outcome.OVERLOADED, 7.0)


def test_a_bad_request_must_be_refused_with_a_message() -> None:
    assert answered(400, {"error": {"message": "x"}}, is_bad=True).outcome is Outcome.REFUSED
    assert answered(200, whole(), is_bad=True).problem == "bad request answered with 200"
    assert answered(500, {"error": {"message": "x"}}, is_bad=True).problem == "bad request answered with 500"
    assert answered(404, "nothing", is_bad=True).problem == "an answer that is not JSON"


def test_a_client_leaves_after_so_many_events() -> None:
    result = streamed(*[chunk("a", n) for n in range(1, 9)], leave_after_events=3)
    assert (result.outcome, len(result.arrivals)) == (Outcome.LEFT, 3)


def test_a_client_leaves_when_its_time_is_over() -> None:
    async def main() -> CallResult:
        async def respond(_: httpx.Request) -> httpx.Response:
            await asyncio.sleep(30)
            raise AssertionError("not left")

        result = CallResult(call=Call(kind="x", path="/", body=BODY, leave_after_s=0.01))
        async with httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://test") as client:
            await perform(client, result)
        return result

    assert asyncio.run(main()).outcome is Outcome.LEFT


def test_a_lost_connection_is_a_failure_of_its_name() -> None:
    def respond(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("gone")

    result = result_of(Call(kind="x", path="/", body=BODY), respond)
    assert (result.outcome, result.problem, result.detail) == (Outcome.FAILED, "ConnectError", "gone")
