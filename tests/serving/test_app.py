"""The routes: answers, streams, usage, errors, health and metrics."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from byte_tokenizers import BOS_ID, END_OF_TURN_ID, EOS_ID, byte_level_tokenizer
from fake_engine import FakeEngine, says
from sse import events

import dspark
from dspark.request import Request

K1_TEXT = "é 世界 😀👨‍👩‍👧 end"


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


# -- whole answers -----------------------------------------------------------------------------------------


def test_completion_answers_in_the_apis_shape(open_app: Callable[..., Any]) -> None:
    answer = open_app(FakeEngine(says("hello"))).complete(prompt="12345").json()
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "toy",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 6,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_chat_answers_in_the_apis_shape(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(says("hello")))
    answer = app.chat(messages=[{"role": "user", "content": "hi"}]).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert app.engine.seen[0].prompt_token_ids == [*b"user:hi", END_OF_TURN_ID, *b"assistant:"]
    assert answer["usage"]["prompt_tokens"] == 18


def test_chat_template_gets_its_arguments(app: Any) -> None:
    app.chat(add_generation_prompt=False, chat_template_kwargs={"thinking": False}, max_tokens=1)
    assert app.engine.tokenizer.chat_calls == [([{"role": "user", "content": "hi"}], False, {"thinking": False})]


def test_completion_is_limited_to_16_tokens_by_default_and_a_chat_by_the_context(app: Any) -> None:
    choice = app.complete().json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcdefghijklmnop", "length")
    assert app.chat().json()["usage"]["total_tokens"] == app.engine.max_model_len


def test_default_limit_yields_to_the_context_end(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(max_model_len=32))
    for num_tokens, num_answered in ((30, 2), (31, 1)):
        answer = app.complete(prompt=[65] * num_tokens).json()
        assert answer["usage"]["completion_tokens"] == num_answered
        assert answer["choices"][0]["finish_reason"] == "length"
    for num_tokens in (32, 33, 100):
        response = app.complete(prompt=[65] * num_tokens)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert app.complete().status_code == 200


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 15])
def test_usage_and_text_have_exactly_max_tokens(open_app: Callable[..., Any], max_tokens: int) -> None:
    answer = open_app(FakeEngine(block_len=8)).complete(max_tokens=max_tokens, return_token_ids=True).json()
    choice = answer["choices"][0]
    assert choice["text"] == "abcdefghijklmno"[:max_tokens]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == max_tokens


def test_stop_string_is_cut_and_named_and_ids_end_with_it(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(says("END aaaaaaaa"), block_len=9))
    answer = app.complete(stop=["END"], return_token_ids=True).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "END")
    assert choice["token_ids"] == [*b"END"]
    assert choice["prompt_token_ids"] == [*b"hi"]
    assert answer["usage"]["completion_tokens"] == 3


def test_sampling_defaults_of_the_model_are_used(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(defaults={"temperature": 0.25, "top_k": 7}))
    app.complete(temperature=0.5)
    sampling = app.engine.seen[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 1.0)


def test_draft_length_reaches_the_engine(app: Any) -> None:
    app.complete(speculation={"num_draft_tokens": 0})
    app.complete()
    assert [request.sampling.num_draft_tokens for request in app.engine.seen] == [0, None]


# -- several choices ---------------------------------------------------------------------------------------


def by_seed(request: Request) -> Iterable[int]:
    return itertools.chain(str(request.sampling.seed).encode(), [EOS_ID])


def test_choices_are_requests_of_their_own_with_reproducible_seeds(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(by_seed))
    answers = [app.complete(n=4, seed=5, max_tokens=30).json() for _ in range(2)]
    texts = [choice["text"] for choice in answers[0]["choices"]]
    assert texts[0] == "5"
    assert len(set(texts)) == 4
    assert [choice["index"] for choice in answers[0]["choices"]] == [0, 1, 2, 3]
    assert texts == [choice["text"] for choice in answers[1]["choices"]]


def test_choices_end_independently_and_share_the_prompt_in_the_usage(open_app: Callable[..., Any]) -> None:
    lengths = itertools.cycle([1, 5])
    app = open_app(FakeEngine(lambda request: [*b"abcdefgh"[: next(lengths)], EOS_ID], block_len=2))
    answer = app.complete(prompt=["12345", "678"], n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "abcde", "a", "abcde"]
    assert answer["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 16,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_streamed_choices_are_told_apart_by_index(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(by_seed))
    chunks = events(app.chat(n=3, seed=5, stream=True, max_tokens=30).text)
    whole = app.chat(n=3, seed=5, max_tokens=30).json()
    assert [text_of(chunks, i) for i in range(3)] == [c["message"]["content"] for c in whole["choices"]]
    roles = [c["index"] for chunk in chunks for c in chunk["choices"] if "role" in c["delta"]]
    assert sorted(roles) == [0, 1, 2]


# -- streams -----------------------------------------------------------------------------------------------


def test_completion_stream_has_one_chunk_per_step(app: Any) -> None:
    response = app.complete(stream=True, max_tokens=7)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["abc", "def", "g"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_chat_stream_begins_with_the_role(app: Any) -> None:
    chunks = events(app.chat(stream=True, max_tokens=5).text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "abc"},
        {"content": "de"},
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_comes_in_a_last_chunk_without_choices(app: Any) -> None:
    chunks = events(app.complete(stream=True, max_tokens=40, stream_options={"include_usage": True}).text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 40
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 14


def test_continuous_usage_counts_tokens_not_chunks(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(block_len=4))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(app.complete(stream=True, max_tokens=40, stream_options=options).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [*range(4, 41, 4), 40]


def test_held_back_characters_are_counted_in_the_continuous_usage(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(says("😀"), block_len=1))
    chunks = events(app.complete(stream=True, stream_options={"continuous_usage_stats": True}).text)
    assert [(c["choices"][0]["text"], c["usage"]["completion_tokens"]) for c in chunks] == [
        ("", 1),
        ("", 2),
        ("", 3),
        ("😀", 4),
        ("", 5),
    ]


def test_step_without_text_makes_no_chunk_unless_tokens_are_asked_for(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(says("😀"), block_len=1))
    assert [c["choices"][0]["text"] for c in events(app.complete(stream=True).text)] == ["😀", ""]
    chunks = events(app.complete(stream=True, return_token_ids=True).text)
    assert [c["choices"][0]["token_ids"] for c in chunks] == [[0xF0], [0x9F], [0x98], [0x80], [EOS_ID]]
    assert [c["choices"][0].get("prompt_token_ids") for c in chunks] == [[*b"hi"], None, None, None, None]


@pytest.mark.parametrize("block_len", range(1, 10))
def test_characters_split_over_tokens_stay_whole_in_the_stream(open_app: Callable[..., Any], block_len: int) -> None:
    app = open_app(FakeEngine(says(K1_TEXT), block_len=block_len))
    body = app.complete(stream=True, max_tokens=60).text
    assert text_of(events(body)) == K1_TEXT
    assert "\ufffd" not in body
    num_tokens = len(K1_TEXT.encode()) - 6  # "👧 end" cut in its middle
    chunks = events(app.complete(stream=True, max_tokens=num_tokens).text)
    assert text_of(chunks) == K1_TEXT.removesuffix("👧 end") + "\ufffd"


@pytest.mark.parametrize("block_len", range(1, 9))
def test_stream_never_shows_part_of_a_stop_string(open_app: Callable[..., Any], block_len: int) -> None:
    app = open_app(FakeEngine(says("foo<ENX<END>bar"), block_len=block_len))
    chunks = events(app.complete(stream=True, stop="<END>").text)
    whole = app.complete(stop="<END>").json()["choices"][0]
    assert text_of(chunks) == whole["text"] == "foo<ENX"
    assert chunks[-1]["choices"][0]["stop_reason"] == "<END>"


def test_event_is_one_line_whatever_the_text(open_app: Callable[..., Any]) -> None:
    text = "a\nb\r\nc\u2028d\u2029e\x85f\x0bg"
    body = open_app(FakeEngine(says(text))).complete(stream=True, max_tokens=60).text
    assert text_of(events(body)) == text
    assert len(body.splitlines()) == 2 * body.count("data: ")


def test_fault_in_a_stream_is_an_event(app: Any) -> None:
    app.engine.num_failing_steps = 1
    response = app.complete(stream=True)
    assert response.status_code == 200
    message = "the engine failed: the scripted fault"
    assert events(response.text) == [
        {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    ]
    assert app.complete().status_code == 200


def test_fault_without_a_stream_is_a_500(app: Any) -> None:
    app.engine.num_failing_steps = 1
    response = app.complete(n=2)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the engine failed: the scripted fault"
    assert app.complete().status_code == 200


# -- refusals ----------------------------------------------------------------------------------------------


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_refusal_names_the_field(app: Any) -> None:
    error = error_of(app.complete(temperature="hot"), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", "temperature")
    assert error_of(app.complete(max_tokens=0), 400)["param"] == "max_tokens"
    assert error_of(app.chat(messages=[]), 400)["param"] == "messages"
    assert error_of(app.complete(best_of=3), 400)["param"] == "best_of"
    assert error_of(app.complete(max_tokens=1000), 400)["code"] == "context_length_exceeded"
    assert app.engine.seen == []


def test_other_model_is_not_found(app: Any) -> None:
    error = error_of(app.complete(model="gpt"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert len(app.complete(model="x" * 10**6).content) < 1000


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"model":"toy","prompt":"\\ud800"}', b"[" * 10**5])
def test_broken_body_is_a_400(app: Any, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        error_of(app.post(path, body), 400)


def test_content_type_does_not_matter(app: Any) -> None:
    body = {"model": "toy", "prompt": "hi"}
    assert app.post("/v1/completions", body, headers={"content-type": "text/plain"}).status_code == 200


def test_body_over_the_limit_is_a_413(open_app: Callable[..., Any]) -> None:
    app = open_app(max_body_bytes=100)
    assert error_of(app.complete(prompt="x" * 100), 413)["code"] == "request_too_large"

    async def parts() -> Any:
        for _ in range(20):
            yield b"x" * 10

    chunked = app.run(app.http.post("/v1/completions", content=parts()))
    assert error_of(chunked, 413)["code"] == "request_too_large"
    assert app.complete(prompt="x").status_code == 200


def test_unknown_path_and_wrong_method_answer_in_the_same_shape(app: Any) -> None:
    assert "/v1/nothing" in error_of(app.get("/v1/nothing"), 404)["message"]
    response = app.get("/v1/completions")
    assert "use POST" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"


def test_empty_prompt_is_fine_only_with_a_bos_token(open_app: Callable[..., Any]) -> None:
    assert error_of(open_app().complete(prompt=""), 400)["param"] == "prompt"
    app = open_app(FakeEngine(tokenizer=byte_level_tokenizer(bos_token_id=BOS_ID)))
    assert app.complete(prompt="").json()["usage"]["prompt_tokens"] == 1
    assert error_of(app.complete(prompt=[]), 400)["param"] == "prompt"
    assert error_of(app.complete(prompt=[[65], []]), 400)["param"] == "prompt"


@pytest.mark.parametrize("prompt", [[65], [BOS_ID], [EOS_ID], "x"])
def test_one_token_prompt_is_fine(app: Any, prompt: Any) -> None:
    assert app.complete(prompt=prompt).json()["usage"]["prompt_tokens"] == 1


def test_refusal_of_the_chat_template_is_a_400(open_app: Callable[..., Any]) -> None:
    assert error_of(open_app().chat(messages=[{"role": "judge", "content": "x"}]), 400)["param"] == "messages"
    app = open_app(FakeEngine(tokenizer=byte_level_tokenizer(has_chat_template=False)))
    assert "no chat template" in error_of(app.chat(), 400)["message"]


def test_unexpected_fault_of_the_server_is_a_500_without_details(app: Any) -> None:
    app.engine.tokenizer = None
    error = error_of(app.complete(), 500)
    assert (error["type"], error["message"]) == ("server_error", "the server failed; its log says more")


# -- clients that leave, and the end -----------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [True, False])
def test_request_of_a_client_that_leaves_before_the_first_token_is_aborted(app: Any, is_stream: bool) -> None:
    app.engine.gate.clear()
    body = {"model": "toy", "prompt": "hi", "n": 2, "stream": is_stream}

    async def leave() -> None:
        call = asyncio.create_task(app.http.post("/v1/completions", json=body))
        while len(app.engine.seen) < 2:
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    app.run(leave())
    app.engine.gate.set()
    assert app.complete(max_tokens=3).json()["choices"][0]["text"] == "abc"
    assert len(app.engine.aborted_ids) == 2


def test_aborted_request_says_so_in_its_finish_reason(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(max_model_len=10**6, step_s=0.005))

    async def call_and_shut_down() -> list[Any]:
        body = {"model": "toy", "prompt": "hi", "max_tokens": 10**5}
        calls = [
            asyncio.create_task(app.http.post("/v1/completions", json={**body, "stream": stream}))
            for stream in (False, True)
        ]
        while len(app.engine.seen) < 2:
            await asyncio.sleep(0.001)
        await app.bridge.shutdown(timeout_s=0.05)
        return [await call for call in calls]

    whole, stream = app.run(call_and_shut_down())
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert choice["text"].startswith("abc")
    assert events(stream.text)[-1]["choices"][0]["finish_reason"] == "abort"
    assert error_of(app.complete(), 503)["code"] == "unavailable"
    assert error_of(app.complete(stream=True), 503)["type"] == "server_error"
    assert app.get("/health").status_code == 503


# -- the other routes --------------------------------------------------------------------------------------


def test_models_are_listed(app: Any) -> None:
    answer = app.get("/v1/models").json()
    assert answer["object"] == "list"
    assert [(m["id"], m["object"], m["max_model_len"]) for m in answer["data"]] == [("toy", "model", 64)]
    assert app.get("/v1/models/toy").json() == answer["data"][0]
    assert error_of(app.get("/v1/models/some/other"), 404)["code"] == "model_not_found"


def test_health_and_version(app: Any) -> None:
    response = app.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert app.get("/version").json() == {"version": dspark.__version__}


def test_health_is_503_when_steps_keep_failing(app: Any) -> None:
    app.engine.num_failing_steps = 10**6
    for _ in range(3):
        app.complete()
    assert (app.get("/health").status_code, app.get("/health").json()) == (503, {"status": "failed"})


def test_metrics_are_those_of_the_engine(app: Any) -> None:
    app.engine.metrics.num_rounds.inc(3)
    response = app.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'vllm:spec_decode_num_drafts_total{model_name="toy"} 3.0' in response.text


def test_answer_is_compact_utf_8(open_app: Callable[..., Any]) -> None:
    response = open_app(FakeEngine(says("世"))).complete()
    assert '"text":"世"' in response.content.decode()
    assert json.loads(response.content)["choices"][0]["text"] == "世"
