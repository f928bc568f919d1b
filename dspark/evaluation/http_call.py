"""One call of the HTTP API as a client makes it, well-behaved or not, and what came of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

OVERLOAD_STATUSES = (429, 503)
DONE = "[DONE]"


class Outcome(StrEnum):
    """What came of a call."""

    ANSWERED = "answered"
    REFUSED = "refused"  # 4xx, as it should be
    LEFT = "left"  # by the client, as planned
    OVERLOADED = "overloaded"  # 429 or 503 that says when to try again
    CUT = "cut"  # was under way when the measurement ended
    FAILED = "failed"  # anything else; `CallResult.problem` says what


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a client sends, and how it behaves meanwhile."""

    kind: str
    path: str
    body: Mapping[str, Any] | bytes | None = None  # None: GET
    is_bad: bool = False  # right is a 4xx
    leave_after_events: int | None = None  # hang up when so many events of the stream have come
    leave_after_s: float | None = None  # hang up then, whatever has come
    read_pause_s: float = 0.0  # between two events

    @property
    def is_stream(self) -> bool:
        """Whether the answer comes as events."""
        return isinstance(self.body, Mapping) and bool(self.body.get("stream"))


@dataclass(kw_only=True)
class CallResult:
    """What is known of a call; filled while it is under way. Times are those of `time.monotonic`."""

    call: Call
    started_s: float = 0.0
    ended_s: float | None = None
    outcome: Outcome = Outcome.CUT
    problem: str = ""  # of a failed call, in few words, so that equal ones can be counted
    detail: str = ""  # what else is known of a failed call
    retry_after_s: float = 0.0  # of an overloaded one
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # of each event with a choice: when, tokens so far
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    finish_reasons: dict[int, str] = field(default_factory=dict)
    num_tokens: int = 0  # of all choices, as the usage says

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first event with a choice."""
        return self.arrivals[0][0] - self.started_s if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after those of the first event, where more came."""
        if len(self.arrivals) < 2:
            return None
        (first_s, num_first), (last_s, num_last) = self.arrivals[0], self.arrivals[-1]
        return (last_s - first_s) / (num_last - num_first) if num_last > num_first else None


class _Problem(Exception):
    """Something that must not happen: in few words, and with what else is known."""

    def __init__(self, problem: str, detail: str = "") -> None:
        super().__init__(problem)
        self.problem, self.detail = problem, detail


class _Left(Exception):
    """The client hangs up, as planned."""


async def perform(client: httpx.AsyncClient, result: CallResult) -> None:
    """Make `result.call` and fill in what comes of it. Raises nothing but cancellation, which leaves it as "cut"."""
    call = result.call
    result.started_s = time.monotonic()
    try:
        async with asyncio.timeout(call.leave_after_s):
            await _perform(client, result)
    except (_Left, TimeoutError):
        result.outcome = Outcome.LEFT
    except _Problem as problem:
        result.outcome, result.problem, result.detail = Outcome.FAILED, problem.problem, problem.detail
    except (KeyError, TypeError, AttributeError) as error:
        result.outcome, result.problem, result.detail = Outcome.FAILED, "an answer of another shape", repr(error)
    except (httpx.HTTPError, httpx.StreamError) as error:
        result.outcome, result.problem, result.detail = Outcome.FAILED, type(error).__name__, str(error)
    result.ended_s = time.monotonic()


async def _perform(client: httpx.AsyncClient, result: CallResult) -> None:
    call = result.call
    if call.body is None:
        request = client.build_request("GET", call.path)
    else:
        content = call.body if isinstance(call.body, bytes) else json.dumps(call.body).encode()
        request = client.build_request("POST", call.path, content=content, headers={"content-type": "application/json"})
    response = await client.send(request, stream=True)
    try:
        if response.status_code != 200 or not call.is_stream or call.is_bad:
            await response.aread()
            _judge_whole(result, response)
        else:
            await _read_stream(result, response)
            result.outcome = Outcome.ANSWERED
    finally:
        await response.aclose()  # of an answer not read to its end: hangs up


def _judge_whole(result: CallResult, response: httpx.Response) -> None:
    call, status = result.call, response.status_code
    if status in OVERLOAD_STATUSES:
        _error_message(response)
        result.retry_after_s = _retry_after_s(response)
        result.outcome = Outcome.OVERLOADED
        return
    if call.is_bad:
        if not 400 <= status < 500:
            raise _Problem(f"bad request answered with {status}", f"{call.kind}: {response.text[:500]}")
        _error_message(response)
        result.outcome = Outcome.REFUSED
        return
    if status != 200:
        raise _Problem(f"status {status}", response.text[:500])
    if call.body is not None:
        _take_answer(result, _parsed(response.text))
    result.outcome = Outcome.ANSWERED


def _error_message(response: httpx.Response) -> str:
    fields = _parsed(response.text).get("error")
    message = fields.get("message") if isinstance(fields, dict) else None
    if not isinstance(message, str) or not message:
        raise _Problem(f"status {response.status_code} without an error message", response.text[:500])
    return message


def _retry_after_s(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    if not text.isdecimal():
        raise _Problem(f"status {response.status_code} without Retry-After", response.text[:500])
    return float(text)


def _take_answer(result: CallResult, answer: dict[str, Any]) -> None:
    for choice in answer.get("choices", ()):
        content = choice["message"]["content"] if "message" in choice else choice["text"]
        _take_choice(result, choice, content or "")
    _check_end(result, answer.get("usage"))


async def _read_stream(result: CallResult, response: httpx.Response) -> None:
    call, usage, num_events, has_ended = result.call, None, 0, False
    async for data in _events(response):
        if has_ended:
            raise _Problem("an event after [DONE]", data[:500])
        if data == DONE:
            has_ended = True
            continue
        event = _parsed(data)
        if "error" in event:
            raise _Problem("an error in a stream", data[:500])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            content = choice["delta"].get("content") if "delta" in choice else choice["text"]
            _take_choice(result, choice, content or "")
        if event["choices"]:
            num_so_far = usage["completion_tokens"] if usage else 0
            result.arrivals.append((time.monotonic(), num_so_far))
        num_events += 1
        if num_events == call.leave_after_events:
            raise _Left
        if call.read_pause_s:
            await asyncio.sleep(call.read_pause_s)
    if not has_ended:
        raise _Problem("a stream without [DONE]")
    _check_end(result, usage)


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
        elif line and not line.startswith(":"):
            raise _Problem("a line in a stream that is no event", line[:500])


def _take_choice(result: CallResult, choice: Mapping[str, Any], content: str) -> None:
    index = choice["index"]
    result.texts[index] = result.texts.get(index, "") + content
    if choice.get("finish_reason") is not None:
        result.finish_reasons[index] = choice["finish_reason"]


def _check_end(result: CallResult, usage: Mapping[str, Any] | None) -> None:
    """Raise `_Problem` unless the answer is whole."""
    body = result.call.body
    assert isinstance(body, Mapping), body
    num_choices = body.get("n", 1)
    if sorted(result.finish_reasons) != list(range(num_choices)):
        raise _Problem("choices without an end", f"{sorted(result.finish_reasons)} of {num_choices}")
    for reason in result.finish_reasons.values():
        if reason not in ("stop", "length"):
            raise _Problem(f"finish reason {reason}")
    if usage is None:
        raise _Problem("an answer without usage")
    result.num_tokens = usage["completion_tokens"]
    limit = body["max_tokens"] * num_choices
    if not num_choices <= result.num_tokens <= limit:
        raise _Problem("more or fewer tokens than asked for", f"{result.num_tokens}, not 1 to {limit}")
    for stop in body.get("stop", ()):
        if any(stop in text for text in result.texts.values()):
            raise _Problem("a stop string in the text", f"{stop!r}")


def _parsed(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise _Problem("an answer that is not JSON", text[:500]) from error
    if not isinstance(fields, dict):
        raise _Problem("an answer that is no JSON object", text[:500])
    return fields
