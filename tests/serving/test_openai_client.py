"""The official `openai` client against a real server: every kind of drafter, both endpoints, sync and async, errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from byte_engines import KINDS, byte_engine, live_server
from fake_engine import FakeEngine
from openai import AsyncOpenAI, OpenAI
from toys import hashed_rule, make_engine, perfect_proposer

PROMPT = "one two one two "
MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi hi"}]
USAGE: Any = {"include_usage": True}


@dataclass(frozen=True)
class Served:
    kind: str
    engine: Any
    url: str

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def run(self, call: Callable[[AsyncOpenAI], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
                return await call(client)

        return asyncio.run(run())


@pytest.fixture(scope="module", params=KINDS)
def served(request: Any) -> Iterator[Served]:
    engine = byte_engine(request.param)
    with live_server(engine) as url:
        yield Served(request.param, engine, url)
    assert engine.allocator.num_used == 0


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with served.client() as client:
        yield client


@pytest.fixture
def serve() -> Iterator[Callable[[Any], Served]]:
    """Return a function that serves an engine until the test ends."""
    stack = []

    def start(engine: Any) -> Served:
        server = live_server(engine)
        stack.append(server)
        return Served("other", engine, server.__enter__())

    yield start
    for server in stack:
        server.__exit__(None, None, None)


# -- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
def test_completions_whole_and_streamed_sync_and_async_say_the_same(served: Served, temperature: float) -> None:
    asked: Any = {
        "model": "toy", "prompt": PROMPT, "max_tokens": 12, "temperature": temperature, "seed": 5, "logprobs": 2,
    }  # fmt: skip
    with served.client() as client:
        whole = client.completions.create(**asked)
        chunks = list(client.completions.create(**asked, stream=True, stream_options=USAGE))

    async def use(client: AsyncOpenAI) -> Any:
        stream = await client.completions.create(**asked, stream=True, stream_options=USAGE)
        return await client.completions.create(**asked), [chunk async for chunk in stream]

    async_whole, async_chunks = served.run(use)
    assert whole.object == "text_completion"
    choice = whole.choices[0]
    assert (choice.finish_reason, len(choice.logprobs.tokens)) == ("length", 12)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (16, 12, 28)
    assert async_whole.choices[0].text == choice.text
    assert async_whole.choices[0].logprobs.token_logprobs == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    for own in (chunks, async_chunks):
        *parts, last = own
        assert "".join(chunk.choices[0].text for chunk in parts) == choice.text
        assert [t for chunk in parts for t in chunk.choices[0].logprobs.tokens] == choice.logprobs.tokens
        assert parts[-1].choices[0].finish_reason == "length"
        assert (last.choices, last.usage.completion_tokens) == ([], 12)
        assert {chunk.id for chunk in own} == {last.id}


@pytest.mark.parametrize("temperature", [0, 1])
def test_chats_whole_and_streamed_sync_and_async_say_the_same(served: Served, temperature: float) -> None:
    asked: Any = {
        "model": "toy", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": temperature, "seed": 6,
        "logprobs": True, "top_logprobs": 2, "n": 2, "presence_penalty": 0.5,
    }  # fmt: skip
    with served.client() as client:
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=USAGE))

    async def use(client: AsyncOpenAI) -> Any:
        stream = await client.chat.completions.create(**asked, stream=True, stream_options=USAGE)
        return await client.chat.completions.create(**asked), [chunk async for chunk in stream]

    async_whole, async_chunks = served.run(use)
    assert whole.object == "chat.completion"
    assert [choice.message.role for choice in whole.choices] == ["assistant"] * 2
    assert (whole.choices[0].message.content == whole.choices[1].message.content) == (temperature == 0)
    assert all(len(choice.logprobs.content) == 12 for choice in whole.choices)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (37, 24)
    assert [c.message for c in async_whole.choices] == [c.message for c in whole.choices]
    for own in (chunks, async_chunks):
        assert own[-1].choices == []
        assert own[-1].usage.completion_tokens == 24
        for index, choice in enumerate(whole.choices):
            deltas = [c.choices[0] for c in own[:-1] if c.choices[0].index == index]
            assert deltas[0].delta.role == "assistant"
            assert "".join(part.delta.content for part in deltas) == choice.message.content
            entries = [entry for part in deltas for entry in part.logprobs.content]
            assert [e.token for e in entries] == [e.token for e in choice.logprobs.content]
            assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in choice.logprobs.content], abs=1e-4)
            assert deltas[-1].finish_reason == "length"


@pytest.fixture(scope="module")
def plain_client() -> Iterator[OpenAI]:
    with live_server(byte_engine("plain")) as url, Served("plain", None, url).client() as client:
        yield client


def test_every_kind_of_drafter_gives_the_same_answers(client: OpenAI, plain_client: OpenAI) -> None:
    """Standard fields and extensions side by side."""
    calls: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 3, "top_p": 0.9},
        {"temperature": 0, "frequency_penalty": 1.0, "presence_penalty": -0.5, "logit_bias": {"33": -100}},
        {"temperature": 0, "stop": ["!", "_"], "user": "ann", "echo": True},
        {"temperature": 0, "extra_body": {"repetition_penalty": 1.3, "min_tokens": 3, "bad_words": ["x"], "top_k": 9}},
        {"temperature": 0, "extra_body": {"allowed_token_ids": [97, 98], "ignore_eos": True, "return_token_ids": True}},
    ]
    answers, plain_answers = (
        [
            from_.completions.create(model="toy", prompt=PROMPT, max_tokens=10, **call).choices[0].model_dump()
            for call in calls
        ]
        for from_ in (client, plain_client)
    )
    assert answers == plain_answers
    assert set(answers[-1]["token_ids"]) <= {97, 98}
    assert answers[3]["text"].startswith(PROMPT)


def test_a_prompt_is_scored_through_the_client(client: OpenAI) -> None:
    """F3"""
    for _ in range(2):
        scored = client.completions.create(model="toy", prompt=[1, 2, 3], max_tokens=0, echo=True, logprobs=1)
        logprobs = scored.choices[0].logprobs
        assert (len(logprobs.tokens), logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (3, None, None)
        assert all(value < 0 for value in logprobs.token_logprobs[1:])
        assert scored.usage.completion_tokens == 0


def test_the_clients_own_stream_helper_gathers_a_chat(client: OpenAI) -> None:
    ends: Any = {"temperature": 0, "stop": "bb", "extra_body": {"allowed_token_ids": [97, 98], "min_tokens": 3}}
    ends["logit_bias"] = {"98": 8}
    with client.chat.completions.stream(model="toy", messages=MESSAGES, **ends) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    whole = client.chat.completions.create(model="toy", messages=MESSAGES, **ends)
    assert final.choices[0].message.content == text == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_text_parts_and_developer_messages_pass(client: OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
    ]
    answer = client.chat.completions.create(model="toy", messages=messages, max_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_models_are_listed_and_retrieved(served: Served, client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    model = client.models.retrieve("toy")
    assert (model.id, model.object, model.owned_by) == ("toy", "model", "dspark")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")

    async def use(client: AsyncOpenAI) -> Any:
        return [model.id async for model in client.models.list()], (await client.models.retrieve("toy")).id

    assert served.run(use) == (["toy"], "toy")


def test_the_raw_response_is_there_too(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="toy", prompt="a", max_tokens=2)
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().usage.completion_tokens == 2
    with client.chat.completions.with_streaming_response.create(
        model="toy", messages=MESSAGES, max_tokens=2, stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"n": 200}, "n"),
        ({"logprobs": 50}, "logprobs"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
    ],
)
def test_a_bad_request_is_the_clients_exception_with_the_parameters_name(
    client: OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "toy", "prompt": "hi", **fields})  # type: ignore[call-overload]
    assert (caught.value.status_code, caught.value.param) == (400, param)
    assert caught.value.type == "invalid_request_error"
    assert param in caught.value.message


def test_a_bad_request_for_a_stream_is_raised_before_any_chunk(served: Served, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="toy", messages=MESSAGES, stream=True, top_p=7)
    assert caught.value.param == "top_p"

    async def use(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="toy", messages=[], stream=True)
        assert caught.value.param == "messages"

    served.run(use)


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_prompt_that_is_too_long_has_the_apis_code(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="toy", prompt="x" * 200)
    assert caught.value.code == "context_length_exceeded"


def test_a_fault_of_the_engine_is_a_server_error(serve: Callable[[Any], Served]) -> None:
    served = serve(FakeEngine())
    with served.client() as client:
        served.engine.num_failing_steps = 1
        with pytest.raises(openai.InternalServerError, match="the scripted fault"):
            client.completions.create(model="toy", prompt="hi")
        served.engine.num_failing_steps = 1
        with pytest.raises(openai.APIError, match="the scripted fault"):
            list(client.completions.create(model="toy", prompt="hi", stream=True))
        assert client.completions.create(model="toy", prompt="hi", max_tokens=3).choices[0].text == "abc"


# -- clients that leave --------------------------------------------------------------------------------------------

RULE = hashed_rule(16)


def endless_engine() -> Any:
    """A real engine in which an answer may take thousands of steps."""
    return make_engine(
        RULE, 16, proposer=perfect_proposer(RULE), num_pages=4096, page_size=4, max_model_len=16_000, num_draft_tokens=2
    )


def assert_aborted(engine: Any, num_aborted: int) -> None:
    deadline = time.monotonic() + 20
    while engine.has_unfinished():
        assert time.monotonic() < deadline, "the request goes on for nobody"
        time.sleep(0.005)
    labels = {"model_name": "toy", "finished_reason": "abort"}
    assert engine.metrics.registry.get_sample_value("vllm:request_success_total", labels) == num_aborted
    assert engine.allocator.num_used == 0


LONG: Any = {"model": "toy", "prompt": [1, 2, 3], "temperature": 0, "max_tokens": 15_000}
SHORT: Any = {"model": "toy", "prompt": [1, 2, 3], "temperature": 0, "max_tokens": 9}


def test_closing_a_stream_aborts_its_request_and_the_next_answer_is_a_fresh_engines(
    serve: Callable[[Any], Served],
) -> None:
    """K7: two chunks are read, then the client leaves, sync and async."""
    with serve(endless_engine()).client() as client:
        fresh = client.completions.create(**SHORT).choices[0].text
    served = serve(endless_engine())
    with served.client() as client:
        stream = client.completions.create(**LONG, stream=True)
        assert len([next(stream), next(stream)]) == 2
        stream.close()
        assert_aborted(served.engine, 1)
        assert client.completions.create(**SHORT).choices[0].text == fresh

    async def leave(client: AsyncOpenAI) -> None:
        stream = await client.completions.create(**LONG, stream=True, n=2)
        async for _ in stream:
            break
        await stream.close()

    served.run(leave)
    assert_aborted(served.engine, 3)


def test_a_clients_timeout_aborts_its_request(serve: Callable[[Any], Served]) -> None:
    served = serve(endless_engine())
    with served.client(timeout=httpx.Timeout(20, read=0.3)) as client, pytest.raises(openai.APITimeoutError):
        client.completions.create(**LONG)
    assert_aborted(served.engine, 1)


def test_a_cancelled_task_aborts_its_request(serve: Callable[[Any], Served]) -> None:
    served = serve(endless_engine())

    async def leave(client: AsyncOpenAI) -> None:
        call = asyncio.create_task(client.completions.create(**LONG))
        while not served.engine.has_unfinished():
            await asyncio.sleep(0.005)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    served.run(leave)
    assert_aborted(served.engine, 1)


def test_a_client_that_leaves_does_not_disturb_the_others(serve: Callable[[Any], Served]) -> None:
    served = serve(endless_engine())
    with served.client() as client:
        alone = client.completions.create(**{**SHORT, "max_tokens": 60}).choices[0].text

    async def use(client: AsyncOpenAI) -> list[str]:
        leaving = await client.completions.create(**LONG, stream=True)
        calls = [asyncio.create_task(client.completions.create(**{**SHORT, "max_tokens": 60})) for _ in range(3)]
        async for _ in leaving:
            break
        await leaving.close()
        return [(await call).choices[0].text for call in calls]

    assert served.run(use) == [alone] * 3
    assert_aborted(served.engine, 1)
