"""Log-probabilities of prompts over HTTP: `prompt_logprobs`, and an echo with `logprobs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from byte_tokenizers import BOS_ID, EOS_ID, byte_level_tokenizer
from sse import events
from toys import greedy_continuation, hashed_rule, make_engine, perfect_proposer

from dspark.request import TokenLogprobs
from dspark.serving.logprobs import LogprobsWriter, prompt_logprobs_fields
from dspark.speculation.ngram import NgramProposer

VOCAB = 16
RULE = hashed_rule(VOCAB)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
TEXT = "t1t2t3t4t5t6t7t8t9"


def logprobs_after(text: list[int]) -> np.ndarray:
    logits = RULE(tuple(text)).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


@pytest.fixture(params=["perfect", "ngram", "plain"])
def app(request: Any, open_app: Callable[..., Any]) -> Any:
    proposers = {"perfect": lambda: perfect_proposer(RULE), "ngram": NgramProposer, "plain": lambda: None}
    return open_app(make_engine(RULE, VOCAB, proposer=proposers[request.param]()))


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echo_has_the_logprobs_of_prompt_and_answer(app: Any, max_tokens: int) -> None:
    """F3: nine tokens, sent twice; the first has none, so that there are eight values, then those of the answer."""
    text = PROMPT + greedy_continuation(RULE, PROMPT, max_tokens)
    for _ in range(2):
        answer = app.complete(prompt=PROMPT, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0).json()
        (choice,) = answer["choices"]
        assert choice["text"] == "".join(f"t{i}" for i in text)
        assert choice["finish_reason"] == "length"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [f"t{i}" for i in text]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        expected = [logprobs_after(text[:k]) for k in range(1, len(text))]
        own = [row[i] for row, i in zip(expected, text[1:], strict=True)]
        assert logprobs["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
        for row, token_id, top in zip(expected, text[1:], logprobs["top_logprobs"][1:], strict=True):
            assert top == pytest.approx({f"t{i}": row[i] for i in {int(row.argmax()), token_id}}, abs=1e-4)
        assert logprobs["text_offset"] == [len("".join(f"t{i}" for i in text[:k])) for k in range(len(text))]
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert answer["usage"]["prompt_tokens"] == 9


def test_a_streamed_echo_with_logprobs_is_that_of_the_whole_answer(app: Any) -> None:
    body = {"prompt": [PROMPT, [3, 3]], "n": 2, "echo": True, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 7}
    whole = app.complete(**body, temperature=1, seed=2).json()["choices"]
    chunks = [c["choices"][0] for c in events(app.complete(**body, temperature=1, seed=2, stream=True).text)]
    assert len(whole) == 4
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for chunk in own for value in chunk["logprobs"][name]] == values
        assert own[0]["prompt_logprobs"] == choice["prompt_logprobs"]
        assert not any("prompt_logprobs" in chunk for chunk in own[1:])


def test_prompt_logprobs_come_by_token_id_with_their_ranks(app: Any) -> None:
    (choice,) = app.complete(prompt=PROMPT, prompt_logprobs=2, max_tokens=0).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("", None)
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == 8
    for k, entry in enumerate(rest, start=1):
        logprobs = logprobs_after(PROMPT[:k])
        order = np.argsort(-logprobs).tolist()
        listed = dict.fromkeys([*order[:2], PROMPT[k]])
        assert list(entry) == [str(i) for i in listed]
        for token_id in listed:
            found = entry[str(token_id)]
            assert (found["rank"], found["decoded_token"]) == (order.index(token_id) + 1, f"t{token_id}")
            assert found["logprob"] == pytest.approx(logprobs[token_id], abs=1e-4)


def test_each_prompt_has_its_own_and_more_may_be_asked_for_than_of_the_answer(app: Any) -> None:
    body = {"prompt": [PROMPT, [4], [2, 9, 9]], "max_tokens": 2, "temperature": 0, "echo": True}
    choices = app.complete(**body, logprobs=1, prompt_logprobs=5).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [9, 1, 3]
    assert all(len(entry) in (5, 6) for entry in choices[0]["prompt_logprobs"][1:])
    assert all(len(top) in (1, 2) for top in choices[0]["logprobs"]["top_logprobs"][1:])
    assert "prompt_logprobs" not in app.complete(**body, logprobs=1).json()["choices"][0]


def test_an_echo_without_logprobs_and_without_tokens_is_the_prompt(app: Any) -> None:
    answer = app.complete(prompt=PROMPT, echo=True, max_tokens=0).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == (TEXT, None)
    assert answer["usage"]["completion_tokens"] == 0
    (chunk,) = events(app.complete(prompt=PROMPT, echo=True, max_tokens=0, stream=True).text)
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == (TEXT, "length")


@pytest.mark.parametrize("fields", [{}, {"echo": False}, {"logprobs": 1}])
def test_no_token_at_all_is_refused_where_the_prompt_is_not_asked_for(app: Any, fields: dict[str, Any]) -> None:
    response = app.complete(prompt=PROMPT, max_tokens=0, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_chat_tells_them_beside_its_choices(open_app: Callable[..., Any], is_stream: bool) -> None:
    engine = make_engine(hashed_rule(264), 264, proposer=NgramProposer())
    engine.tokenizer = byte_level_tokenizer()
    app = open_app(engine)
    response = app.chat(prompt_logprobs=1, max_tokens=3, n=2, stream=is_stream)
    if is_stream:
        told = [chunk["prompt_logprobs"] for chunk in events(response.text) if "prompt_logprobs" in chunk]
        assert len(told) == 1
        (entries,) = told
    else:
        entries = response.json()["prompt_logprobs"]
        assert "prompt_logprobs" not in app.chat(max_tokens=3).json()
    prompt = app.engine.tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert entries[0] is None
    assert all(str(token_id) in entry for token_id, entry in zip(prompt[1:], entries[1:], strict=True))


# -- shapes --------------------------------------------------------------------------------------------------------


def entries_of(token_ids: list[int]) -> list[TokenLogprobs | None]:
    return [None, *(TokenLogprobs(token_id=i, logprob=-1.0, top=(), rank=3) for i in token_ids[1:])]


def test_offsets_are_places_in_the_text_also_around_special_tokens() -> None:
    """The tokenizer's own BOS is not in the text, an EOS that the client wrote out is; "é" spans two tokens."""
    echo = "é<eos>b"
    prompt = [BOS_ID, *"é".encode(), EOS_ID, ord("b")]
    writer = LogprobsWriter(byte_level_tokenizer(), is_chat=False, echo=echo)
    assert writer.write_echo(prompt, entries_of(prompt), 0)["text_offset"] == [0, 0, 0, 1, 6]
    answer = [ord("c"), BOS_ID, ord("d")]
    assert writer.write(entries_of([0, *answer])[1:])["text_offset"] == [7, 8, 8]
    writer = LogprobsWriter(byte_level_tokenizer(), is_chat=False, echo=echo, skips_special_tokens=False)
    assert writer.write(entries_of([0, *answer])[1:])["text_offset"] == [7, 8, 13]


def test_the_prompts_own_token_is_listed_also_when_it_is_not_among_the_likeliest() -> None:
    entry = TokenLogprobs(token_id=0xC3, logprob=float("-inf"), top=((65, -0.5), (66, -0.9)), rank=9)
    assert prompt_logprobs_fields(byte_level_tokenizer(), [None, entry], 1) == [
        None,
        {
            "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
            "195": {"logprob": -9999.0, "rank": 9, "decoded_token": "�"},
        },
    ]
