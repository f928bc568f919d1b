"""Parameters that change or report the target's logits, and the echo, over a real engine with a toy target."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from byte_engines import byte_engine
from byte_tokenizers import EOS_ID, byte_fallback_backend, byte_level_tokenizer
from fake_engine import FakeEngine, says
from sse import events
from toys import hashed_rule, make_engine, perfect_proposer

from dspark.engine.detokenizer import token_bytes
from dspark.request import TokenLogprobs
from dspark.serving.logprobs import LogprobsWriter

VOCAB = 16
RULE = hashed_rule(VOCAB)
PROMPT = [1, 2, 3]
CHANGES = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 2},
    {"logit_bias": {"3": 5, "4": -100}},
    {"bad_token_ids": [0, 1, 2]},
    {"allowed_token_ids": [5, 6, 7]},
]


@pytest.fixture
def app(open_app: Callable[..., Any]) -> Any:
    return open_app(make_engine(RULE, VOCAB, proposer=perfect_proposer(RULE)))


@pytest.fixture
def plain_app(open_app: Callable[..., Any]) -> Any:
    return open_app(make_engine(RULE, VOCAB))


# -- changes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_gives_the_same_with_and_without_speculation_and_streamed(
    app: Any, plain_app: Any, change: dict[str, Any], temperature: float
) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 20,
        "temperature": temperature,
        "seed": 4,
        "return_token_ids": True,
        **change,
    }
    choice = plain_app.complete(**body).json()["choices"][0]
    assert app.complete(**body).json()["choices"][0] == choice
    chunks = [chunk["choices"][0] for chunk in events(app.complete(**body, stream=True).text)]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert [i for chunk in chunks for i in chunk["token_ids"]] == choice["token_ids"]
    if temperature == 0:
        unchanged = plain_app.complete(**{**body, **dict.fromkeys(change)}).json()["choices"][0]
        assert (choice == unchanged) == (not change)


def test_choices_of_one_call_keep_counts_of_their_own(app: Any, plain_app: Any) -> None:
    body = {"prompt": PROMPT, "n": 4, "seed": 9, "temperature": 1.5, "max_tokens": 16, "frequency_penalty": 1.2}
    choices = plain_app.complete(**body).json()["choices"]
    assert app.complete(**body).json()["choices"] == choices
    assert len({choice["text"] for choice in choices}) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"16": 1}}, "logit_bias"),
        ({"bad_token_ids": [16]}, "bad_token_ids"),
        ({"allowed_token_ids": [99]}, "allowed_token_ids"),
        ({"bad_token_ids": list(range(16))}, "bad_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_it(app: Any, fields: dict[str, Any], param: str) -> None:
    response = app.complete(prompt=PROMPT, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert param in response.json()["error"]["message"]


def test_user_and_neutral_values_change_nothing(app: Any) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    neutral = {
        "user": "ann", "best_of": 1, "presence_penalty": 0, "frequency_penalty": None, "repetition_penalty": 1.0,
        "logit_bias": {}, "bad_token_ids": [], "allowed_token_ids": None, "logprobs": None, "echo": False,
    }  # fmt: skip
    assert app.complete(**body, **neutral).json()["choices"] == app.complete(**body).json()["choices"]


def test_sampling_defaults_are_the_models_and_give_way_to_the_request(open_app: Callable[..., Any]) -> None:
    defaults = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.7}
    app, plain_app = open_app(byte_engine("ngram", **defaults)), open_app(byte_engine("plain"))
    body = {"max_tokens": 12, "seed": 3}
    answers = [app.complete(**body, **own).json()["choices"][0]["text"] for own in ({}, {"temperature": 0, "top_k": 1})]
    assert answers == [
        plain_app.complete(**body, **{**defaults, **own}).json()["choices"][0]["text"]
        for own in ({}, {"temperature": 0, "top_k": 1})
    ]
    assert answers[0] != plain_app.complete(**body).json()["choices"][0]["text"]


def test_bad_words_are_banned_in_both_spellings_and_across_blocks(open_app: Callable[..., Any]) -> None:
    """E4: a word of several tokens; every token but its last may come out."""
    app = open_app(FakeEngine())
    assert app.complete(bad_words=["no", "é"]).status_code == 200
    sampling = app.engine.seen[0].sampling
    assert sampling.bad_token_sequences == ((*b"no",), (*b" no",), (*"é".encode(),), (*" é".encode(),))
    assert app.complete(bad_words=[str(i) for i in range(300)]).json()["error"]["param"] == "bad_words"


# -- log-probabilities ---------------------------------------------------------------------------------------------


def logprobs_after(text: list[int]) -> np.ndarray:
    logits = RULE(tuple(text)).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


@pytest.mark.parametrize("temperature", [0, 1])
def test_completions_report_the_targets_logprobs(app: Any, temperature: float) -> None:
    """F1"""
    choice = app.complete(
        prompt=PROMPT, temperature=temperature, seed=2, max_tokens=9, logprobs=2, return_token_ids=True
    ).json()["choices"][0]
    logprobs, token_ids = choice["logprobs"], choice["token_ids"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["tokens"] == [f"t{i}" for i in token_ids]
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:k])) for k in range(9)]
    for k, token_id in enumerate(token_ids):
        expected = logprobs_after(PROMPT + token_ids[:k])
        assert logprobs["token_logprobs"][k] == pytest.approx(expected[token_id], abs=1e-4)
        listed = {*np.argsort(-expected)[:2].tolist(), token_id}  # the sampled token is always among them
        assert logprobs["top_logprobs"][k] == pytest.approx({f"t{i}": expected[i] for i in listed}, abs=1e-4)


def test_no_more_than_the_sampled_token_is_listed_for_zero(app: Any) -> None:
    logprobs = app.complete(prompt=PROMPT, temperature=0, max_tokens=3, logprobs=0).json()["choices"][0]["logprobs"]
    pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{token: logprob} for token, logprob in pairs]


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_logprobs_are_those_of_the_whole_answer(app: Any, plain_app: Any, n: int) -> None:
    """F2: one entry for each token, whatever the chunks."""
    body = {"prompt": PROMPT, "temperature": 1, "seed": 3, "max_tokens": 14, "logprobs": 2, "n": n, "stop": ["t9t"]}
    whole = app.complete(**body).json()
    assert [c["text"] for c in whole["choices"]] == [c["text"] for c in plain_app.complete(**body).json()["choices"]]
    chunks = [chunk["choices"][0] for chunk in events(app.complete(**body, stream=True).text)]
    for choice in whole["choices"]:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        for name, values in choice["logprobs"].items():
            assert [value for chunk in own for value in chunk["logprobs"][name]] == values
        assert "".join(chunk["text"] for chunk in own) == choice["text"]


def test_a_chats_logprobs_have_the_shape_of_the_api() -> None:
    writer = LogprobsWriter(byte_level_tokenizer(), is_chat=True)
    entry = TokenLogprobs(token_id=65, logprob=-0.5, top=((65, -0.5), (0xC3, float("-inf"))))
    assert writer.write([entry]) == {
        "content": [
            {
                "token": "A",
                "logprob": -0.5,
                "bytes": [65],
                "top_logprobs": [
                    {"token": "A", "logprob": -0.5, "bytes": [65]},
                    {"token": "�", "logprob": -9999.0, "bytes": [0xC3]},
                ],
            }
        ],
        "refusal": None,
    }


def test_parts_of_characters_are_spelled_out_and_offsets_count_characters() -> None:
    writer = LogprobsWriter(byte_level_tokenizer(), is_chat=False)
    first, second = "é!".encode()[:1], "é!".encode()[1:]
    written = [
        writer.write([TokenLogprobs(token_id=byte, logprob=-1.0, top=()) for byte in part]) for part in (first, second)
    ]
    assert written[0]["tokens"] == ["bytes:\\xc3"]
    assert written[1]["tokens"] == ["bytes:\\xa9", "!"]
    assert [w["text_offset"] for w in written] == [[0], [0, 1]]
    json.dumps(written)


def test_a_chat_asks_for_logprobs_in_two_fields(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(says("hello")))
    assert app.chat(logprobs=True, top_logprobs=4).json()["choices"][0]["logprobs"] == {"content": [], "refusal": None}
    assert [request.sampling.logprobs for request in app.engine.seen] == [4]
    assert app.chat(logprobs=False).json()["choices"][0]["logprobs"] is None


def test_a_tokens_bytes_are_what_it_adds_to_a_text() -> None:
    tokenizer = byte_level_tokenizer()
    assert [token_bytes(tokenizer, i) for i in (65, 0xE4, EOS_ID)] == [b"A", b"\xe4", b"<eos>"]

    class Fallback:
        backend = byte_fallback_backend()

    fallback = Fallback()
    ids = {token: fallback.backend.token_to_id(token) for token in ("▁hello", "hello", "<0xE4>")}
    assert {token: token_bytes(fallback, token_id) for token, token_id in ids.items()} == {
        "▁hello": b" hello",
        "hello": b"hello",
        "<0xE4>": b"\xe4",
    }


# -- echo ----------------------------------------------------------------------------------------------------------


def test_an_echo_begins_every_choice_with_its_prompt(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(says("!")))
    prompts = ["hi <tool>", "yo"]
    answer = app.complete(prompt=prompts, echo=True, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hi <tool>!", "hi <tool>!", "yo!", "yo!"]
    assert answer["usage"]["completion_tokens"] == 8
    assert app.complete(prompt=[*b"ids"], echo=True).json()["choices"][0]["text"] == "ids!"


def test_a_streamed_echo_is_that_of_the_whole_answer(open_app: Callable[..., Any]) -> None:
    app = open_app(FakeEngine(says("hello there"), block_len=2))
    chunks = events(app.complete(prompt="say: ", echo=True, stream=True).text)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts[0].startswith("say: ")
    assert "".join(texts) == "say: hello there"
