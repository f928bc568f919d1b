"""One call, one answer: streamed or whole, with any drafter or none, alone or in a mixed batch.

Text, token ids, log-probabilities and usage of greedy and seeded calls, for every parameter that shapes them, over a
real decoder.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from app_client import AppClient
from byte_engines import KnownTexts, byte_engine
from sse import events

EOS_ID = 185  # ends the greedy answer with a presence penalty at its tenth token
PROMPT = "one two one two one "
CHAT = {"messages": [{"role": "user", "content": "hi hi hi"}]}
PARAMETERS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.2},
    {"repetition_penalty": 1.6},
    {"logit_bias": {"97": 60, "98": 60, "99": -100}},
    {"bad_token_ids": [73, 95]},
    {"bad_words": ["!", "ab"], "logit_bias": {"97": 30, "98": 30, "33": 25}},
    {"allowed_token_ids": [97, 98, 32]},
    {"min_tokens": 6, "stop_token_ids": [35, 73, 95, 144]},
    {"stop": ["ab", "!"], "allowed_token_ids": [97, 98, 33]},
    {"stop": "ba", "include_stop_str_in_output": True, "allowed_token_ids": [97, 98]},
    {"top_k": 4, "top_p": 0.8, "min_p": 0.05},
    {"n": 3, "frequency_penalty": 0.5},
    {"max_tokens": 1},
    {"ignore_eos": True, "presence_penalty": 1.5, "user": "ann"},
    {"prompt_logprobs": 2},
    {"speculation": {"num_draft_tokens": 1}},
]
COMPLETION_ONLY: list[dict[str, Any]] = [
    {"echo": True, "logprobs": 1},
    {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"prompt": [[104, 105], [120], [0, 255, 0]], "n": 2},
    {"prompt": [0]},
]
CHAT_ONLY: list[dict[str, Any]] = [
    {"max_tokens": None, "max_completion_tokens": 5},
    {"chat_template_kwargs": {"closing": ">>>"}},
    {"add_generation_prompt": False},
]


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Return path and body of every call."""
    calls = []
    for number, (change, temperature) in enumerate(itertools.product([*PARAMETERS, *COMPLETION_ONLY], (0, 1.2))):
        shared = {"max_tokens": 11, "temperature": temperature, "seed": number, "logprobs": 2}
        calls.append(("/v1/completions", {"prompt": PROMPT, **shared, **change}))
    for number, (change, temperature) in enumerate(itertools.product([*PARAMETERS[::3], *CHAT_ONLY], (0, 1.2))):
        shared = {"max_tokens": 11, "temperature": temperature, "seed": -number, "logprobs": True, "top_logprobs": 2}
        calls.append(("/v1/chat/completions", {**CHAT, **shared, **change}))
    always = {"model": "toy", "return_token_ids": True, "return_speculation_stats": True}
    return [(path, {**always, **body}) for path, body in calls]


BODIES = bodies()
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def whole(response: httpx.Response) -> dict[str, Any]:
    """Return what a whole answer says, whatever its way: choices, usage and log-probabilities of the prompt."""
    assert response.status_code == 200, response.text
    answer = response.json()
    for choice in answer["choices"]:
        if "message" in choice:
            choice["text"] = choice.pop("message")["content"]
    return in_common(answer)


def put_together(response: httpx.Response) -> dict[str, Any]:
    """Return what the chunks of a stream say together."""
    assert response.status_code == 200, response.text
    choices: dict[int, dict[str, Any]] = {}
    answer: dict[str, Any] = {}
    for chunk in events(response.text):
        answer |= {name: chunk[name] for name in ("usage", "metrics", "prompt_logprobs") if chunk.get(name) is not None}
        for part in chunk["choices"]:
            if "delta" in part:
                part["text"] = part.pop("delta").get("content", "")
            choice = choices.setdefault(part["index"], part)
            if choice is not part:
                assert choice["finish_reason"] is None
                choice["text"] += part["text"]
                choice["token_ids"] += part["token_ids"]
                for name in choice["logprobs"]:
                    if name != "refusal":
                        choice["logprobs"][name] += part["logprobs"][name]
                choice |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    return in_common({**answer, "choices": [choices[index] for index in sorted(choices)]})


def in_common(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["usage"].pop("prompt_tokens_details")["cached_tokens"] >= 0  # that depends on who came before
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])
    names = ("choices", "usage", "prompt_logprobs")
    return {name: answer[name] for name in names if name in answer} | {"metrics": answer["metrics"]}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], body: dict[str, Any]) -> None:
    """Everything is equal, numbers that are not whole up to 1e-4."""
    found, expected = ({k: v for k, v in answer.items() if k != "metrics"} for answer in (found, expected))
    exact, numbers = zip(*(split_numbers(answer) for answer in (found, expected)), strict=True)
    assert exact[0] == exact[1], body
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-4), body


def split_numbers(value: Any) -> tuple[Any, list[float]]:
    """Return `value` with all floats taken out, and these."""
    numbers: list[float] = []

    def keep(text: str) -> None:
        numbers.append(float(text))

    return json.loads(json.dumps(value), parse_float=keep), numbers


@pytest.fixture(scope="module")
def plain_answers() -> list[dict[str, Any]]:
    """Each call alone, without drafts."""
    app = AppClient(byte_engine("plain", eos_token_ids=[EOS_ID]))
    answers = [whole(app.post(path, body)) for path, body in BODIES]
    app.close()
    return answers


@pytest.fixture(params=["plain", "ngram", "dspark"])
def app(request: Any, plain_answers: list[dict[str, Any]]) -> Iterator[AppClient]:
    known = KnownTexts()
    for answer in plain_answers:
        for choice in answer["choices"]:
            known.add(choice["prompt_token_ids"] + choice["token_ids"])
    client = AppClient(byte_engine(request.param, known=known, eos_token_ids=[EOS_ID]))
    client.kind = request.param  # type: ignore[attr-defined]
    yield client
    client.close()


def check_drafting(app: AppClient) -> None:
    """Else the equality says nothing: drafts were accepted and drafts were refused, where there is a drafter."""
    verified, accepted = (
        app.engine.metrics.registry.get_sample_value(f"vllm:spec_decode_num_{k}_tokens_total", {"model_name": "toy"})
        for k in ("draft", "accepted")
    )
    assert verified is not None and accepted is not None
    if app.kind == "plain":  # type: ignore[attr-defined]
        assert verified == 0
    else:
        assert 20 < accepted < verified - 20, (accepted, verified)


def test_every_call_alone(app: AppClient, plain_answers: list[dict[str, Any]]) -> None:
    for number, ((path, body), expected) in enumerate(zip(BODIES, plain_answers, strict=True)):
        is_stream = number // 2 % 2 == 0
        response = app.post(path, {**body, **STREAM} if is_stream else body)
        found = put_together(response) if is_stream else whole(response)
        assert_equal(found, expected, body)
        check_counts(found, body)
    check_drafting(app)
    assert app.engine.allocator.num_used == 0


def check_counts(found: dict[str, Any], body: dict[str, Any]) -> None:
    """L1: each choice gets one token from its prefill, and the rounds put out the rest, no more and no less."""
    stats = found["metrics"]["speculative_decoding"]
    num_answered = sum(len(choice["token_ids"]) > 0 for choice in found["choices"])
    assert stats["num_emitted_tokens"] == found["usage"]["completion_tokens"] - num_answered, body
    assert stats["num_accepted_draft_tokens"] <= stats["num_draft_tokens"] <= stats["num_proposed_tokens"]


def test_all_calls_together(app: AppClient, plain_answers: list[dict[str, Any]]) -> None:
    """Those are streamed here that are not above."""
    streamed = [number // 2 % 2 == 1 for number in range(len(BODIES))]
    calls = [
        app.http.post(path, json={**body, **STREAM} if is_stream else body)
        for (path, body), is_stream in zip(BODIES, streamed, strict=True)
    ]

    async def send_all() -> list[httpx.Response]:
        return await asyncio.gather(*calls)

    responses = app.run(send_all())
    for response, is_stream, (_, body), expected in zip(responses, streamed, BODIES, plain_answers, strict=True):
        assert_equal(put_together(response) if is_stream else whole(response), expected, body)
    check_drafting(app)
    assert app.engine.allocator.num_used == 0


def test_the_parameters_show(plain_answers: list[dict[str, Any]]) -> None:
    """Else the equality says nothing."""
    greedy = [plain_answers[2 * number]["choices"][0]["text"] for number in range(len(PARAMETERS))]
    same = [change for change, text in zip(PARAMETERS, greedy, strict=True) if text == greedy[0]]
    # These change no greedy text.
    filters, scored, limited = PARAMETERS[11], {"prompt_logprobs": 2}, {"speculation": {"num_draft_tokens": 1}}
    assert same == [{}, filters, scored, limited]
    ignoring = PARAMETERS.index({"ignore_eos": True, "presence_penalty": 1.5, "user": "ann"})
    assert plain_answers[2]["choices"][0]["finish_reason"] == "stop"
    assert greedy[ignoring].startswith(greedy[1]) and greedy[ignoring] != greedy[1]
