"""Cases E, F and K of public bug reports, with their own inputs, over HTTP and a real engine. See docs/faults.md."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from byte_engines import byte_engine
from byte_tokenizers import EOS_ID, VOCAB_SIZE, byte_level_tokenizer
from sse import events
from toys import (
    FunctionProposer,
    Rule,
    make_engine,
    perfect_proposer,
    soft_proposer,
    table_rule,
)

from dspark.speculation.ngram import NgramProposer
from dspark.speculation.proposal import Proposer

OpenApp = Callable[..., Any]


def always(token_id: int) -> FunctionProposer:
    return FunctionProposer(lambda c: [token_id] * c.num_draft_tokens)


def saying(text: str, prompt_len: int) -> Rule:
    """A target that says `text` and ends, whatever came out instead of a token; a dash is what it likes next best."""
    token_ids = [*text.encode(), EOS_ID]

    def logits(context: tuple[int, ...]) -> np.ndarray:
        row = np.full(VOCAB_SIZE, -20.0, dtype=np.float32)
        row[ord("-")] = -1.0
        index = len(context) - prompt_len
        row[token_ids[index] if index < len(token_ids) else EOS_ID] = 0.0
        return row

    return logits


def open_saying(open_app: OpenApp, text: str, *, num_draft_tokens: int, proposer: Proposer | None = None) -> Any:
    """Open an application whose model answers the prompt "hi" with `text`, and whose drafter knows that."""
    rule = saying(text, prompt_len=2)
    engine = make_engine(
        rule, VOCAB_SIZE, proposer=proposer or perfect_proposer(rule), num_draft_tokens=num_draft_tokens,
        eos_token_ids=[EOS_ID],
    )  # fmt: skip
    engine.tokenizer = byte_level_tokenizer()  # type: ignore[assignment]
    return open_app(engine)


def text_of(chunks: Sequence[dict[str, Any]]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


# -- E: what changes the logits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_presence_penalty_ends_a_loop(open_app: OpenApp, num_draft_tokens: int, path: str) -> None:
    """E1: logits 2.0 and 1.9 everywhere, presence penalty 0.5: A B A A A A."""
    row = np.full(VOCAB_SIZE, -9.0, dtype=np.float32)
    row[ord("A")], row[ord("B")] = 2.0, 1.9

    def rule(_: tuple[int, ...]) -> np.ndarray:
        return row

    for proposer in (always(ord("A")), soft_proposer(rule, VOCAB_SIZE), NgramProposer()):
        engine = make_engine(rule, VOCAB_SIZE, proposer=proposer, num_draft_tokens=num_draft_tokens)
        engine.tokenizer = byte_level_tokenizer()  # type: ignore[assignment]
        app = open_app(engine)
        asked = {"temperature": 0, "max_tokens": 6, "presence_penalty": 0.5}
        if path == "completions":
            assert app.complete(**asked).json()["choices"][0]["text"] == "ABAAAA"
        else:
            assert app.chat(**asked).json()["choices"][0]["message"]["content"] == "ABAAAA"


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0, 1, 1.5])
def test_a_token_biased_by_minus_100_never_appears(
    open_app: OpenApp, num_draft_tokens: int, temperature: float
) -> None:
    """E4: the favourite, and all that a drafter made for the unbiased target proposes."""
    rule = table_rule([0.9, 0.06, 0.03, 0.01])
    app = open_app(make_engine(rule, 4, proposer=perfect_proposer(rule), num_draft_tokens=num_draft_tokens))
    answer = app.complete(
        prompt=[0], n=8, temperature=temperature, seed=1, max_tokens=20, logit_bias={"0": -100}, return_token_ids=True
    ).json()
    token_ids = {i for choice in answer["choices"] for i in choice["token_ids"]}
    assert token_ids == ({1} if temperature == 0 else {1, 2, 3})


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
def test_min_p_holds_for_every_token_of_a_block(open_app: OpenApp, num_draft_tokens: int) -> None:
    """E4: min_p 0.3 at temperature 1.5 leaves the first two tokens, of which the drafter proposes others too.

    p^(1/1.5) of 0.05 and 0.02 is below 0.3 times that of 0.5, that of 0.43 is not. The law of what comes out is exact
    in `speculation/test_logit_processing.py`.
    """
    rule = table_rule([0.5, 0.43, 0.05, 0.02])
    app = open_app(make_engine(rule, 4, proposer=soft_proposer(rule, 4), num_draft_tokens=num_draft_tokens))
    answer = app.complete(prompt=[0], n=16, temperature=1.5, min_p=0.3, max_tokens=20, return_token_ids=True).json()
    assert {i for choice in answer["choices"] for i in choice["token_ids"]} == {0, 1}


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("num_before", range(7))
def test_a_bad_word_is_broken_wherever_a_block_ends(open_app: OpenApp, num_draft_tokens: int, num_before: int) -> None:
    """E4: of a word of two tokens the first may come out, the second not after it; "a" alone and "b" alone may."""
    app = open_saying(open_app, "x" * num_before + "abba", num_draft_tokens=num_draft_tokens)
    answer = app.complete(temperature=0, max_tokens=20, bad_words=["ab"]).json()
    assert answer["choices"][0]["text"] == "x" * num_before + "a-ba"


# -- F: log-probabilities ------------------------------------------------------------------------------------------

TABLE = np.array([0.45, 0.25, 0.15, 0.1, 0.05])


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logprobs_are_those_of_the_table(open_app: OpenApp, num_draft_tokens: int, temperature: float) -> None:
    """F1: never 0, the top three complete, for a drafter that is mostly right and one that is mostly wrong."""
    rule = table_rule(TABLE)
    for proposer in (perfect_proposer(rule), soft_proposer(rule, 5), always(4)):
        app = open_app(make_engine(rule, 5, proposer=proposer, num_draft_tokens=num_draft_tokens))
        answer = app.complete(
            prompt=[0], temperature=temperature, seed=2, max_tokens=20, logprobs=3, return_token_ids=True
        ).json()
        (choice,) = answer["choices"]
        expected = np.log(TABLE)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected[choice["token_ids"]], abs=1e-4)
        for token_id, top in zip(choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True):
            assert top == pytest.approx({f"t{i}": expected[i] for i in {0, 1, 2, token_id}}, abs=1e-4)


def test_logprobs_of_a_mixed_batch_stay_with_their_requests(open_app: OpenApp) -> None:
    """F2: four calls at once with 0, 1, 3 and 2 of 3 drafted tokens accepted in each round."""
    probs = np.random.default_rng(0).dirichlet(np.ones(8), size=8)
    rule = table_rule(probs)
    num_right = {10: 0, 11: 1, 12: 3, 13: 2}  # by the length of the prompt

    def draft(context: Any) -> list[int]:
        right = num_right[next(n for n in num_right if context.request_id in by_length[n])]
        text, tokens = tuple(context.token_ids), []
        for k in range(context.num_draft_tokens):
            best = int(np.argmax(rule((*text, *tokens))))
            tokens.append(best if k < right else (best + 1) % 8)
        return tokens

    engine = make_engine(rule, 8, proposer=FunctionProposer(draft), num_draft_tokens=3)
    by_length: dict[int, list[str]] = {n: [] for n in num_right}
    add_request = engine.add_request

    def noting(request: Any) -> None:
        by_length[len(request.prompt_token_ids)].append(request.request_id)
        add_request(request)

    engine.add_request = noting  # type: ignore[method-assign]
    app = open_app(engine)
    calls = [
        app.http.post(
            "/v1/completions",
            json={
                "model": "toy", "prompt": [n % 8] * n, "temperature": 0, "max_tokens": 12, "logprobs": 2,
                "return_token_ids": True,
            },
        )
        for n in num_right
    ]  # fmt: skip

    async def send_all() -> Any:
        return await asyncio.gather(*calls)

    for n, response in zip(num_right, app.run(send_all()), strict=True):
        (choice,) = response.json()["choices"]
        path = [n % 8, *choice["token_ids"]]
        expected = [np.log(probs[a][b]) for a, b in pairwise(path)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
        assert len(choice["logprobs"]["tokens"]) == 12


# -- K: the server -------------------------------------------------------------------------------------------------

K1_TEXT = "é 世界 😀👨‍👩‍👧 end"


@pytest.mark.parametrize("block_len", range(1, 10))
def test_characters_stay_whole_whatever_the_rounds_bring(open_app: OpenApp, block_len: int) -> None:
    """K1: rounds of 1 to 9 tokens; also where max_tokens ends the answer in the middle of an emoji."""
    app = open_saying(open_app, K1_TEXT, num_draft_tokens=block_len - 1)
    chunks = events(app.complete(temperature=0, max_tokens=60, stream=True).text)
    assert text_of(chunks) == K1_TEXT
    assert not any("\ufffd" in text_of([chunk]) for chunk in chunks)
    num_tokens = len("é 世界 ".encode()) + 2  # half of the first emoji
    cut = events(app.complete(temperature=0, max_tokens=num_tokens, stream=True).text)
    assert (
        text_of(cut)
        == "é 世界 \ufffd"
        == app.complete(temperature=0, max_tokens=num_tokens).json()["choices"][0]["text"]
    )
    assert not any("\ufffd" in text_of([chunk]) for chunk in cut[:-1])


def test_usage_is_exact_in_every_chunk(open_app: OpenApp) -> None:
    """K3: seven drafted tokens a round, all accepted: eight tokens a chunk, some of whose characters are held back."""
    app = open_saying(open_app, K1_TEXT, num_draft_tokens=7)
    options = {"include_usage": True, "continuous_usage_stats": True}
    whole = app.complete(temperature=0, max_tokens=60).json()
    body = {"temperature": 0, "max_tokens": 60, "stream": True, "stream_options": options, "return_token_ids": True}
    *chunks, last = events(app.complete(**body).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == np.cumsum([len(chunk["choices"][0]["token_ids"]) for chunk in chunks]).tolist()
    assert counts[:4] == [1, 9, 17, 25]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert last["usage"]["completion_tokens"] == len(K1_TEXT.encode()) + 1


def test_each_of_four_choices_ends_on_its_own(open_app: OpenApp) -> None:
    """K4: temperature 1 over a uniform target, a prompt that ends inside a page; a stop that one copy alone meets."""
    rule = table_rule([1 / 16] * 16)
    app = open_app(make_engine(rule, 16, proposer=soft_proposer(rule, 16)))
    body = {"prompt": [1, 2, 3, 4, 5, 6], "n": 4, "temperature": 1, "seed": 5, "max_tokens": 12}
    first, second = (app.complete(**body).json()["choices"] for _ in range(2))
    texts = [choice["text"] for choice in first]
    assert texts == [choice["text"] for choice in second]
    assert len(set(texts)) == 4
    words = [f"t{text}" for text in texts[2].split("t")[1:]]
    stop = next(a + b for a, b in pairwise(words[3:]) if sum(a + b in text for text in texts) == 1)
    stopped = app.complete(**body, stop=stop).json()["choices"]
    assert [choice["finish_reason"] for choice in stopped] == ["length", "length", "stop", "length"]
    assert [choice["text"] for choice in stopped] == [*texts[:2], texts[2].split(stop)[0], texts[3]]
    greedy = app.complete(**{**body, "temperature": 0}).json()["choices"]
    assert len({choice["text"] for choice in greedy}) == 1
    assert app.engine.allocator.num_used == 0


@pytest.mark.parametrize("kind", ["ngram", "dspark", "dspark+ngram"])
@pytest.mark.parametrize("prompt", ["", [1], [7], [35], [35, 35], "ab"])
def test_a_prompt_of_next_to_nothing_is_answered_as_by_plain_decoding(
    open_app: OpenApp, kind: str, prompt: Any
) -> None:
    """K5: empty (BOS alone), BOS, one token, EOS alone, shorter than any history."""
    apps = [open_app(byte_engine(k, bos_token_id=1, eos_token_ids=[35])) for k in (kind, "plain")]
    for temperature in (0, 1):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": temperature, "seed": 3, "return_token_ids": True}
        found, expected = (app.complete(**body) for app in apps)
        assert (found.status_code, expected.status_code) == (200, 200)
        assert found.json()["choices"] == expected.json()["choices"]


def test_prompts_of_nothing_at_all_are_refused_and_the_next_call_is_served(open_app: OpenApp) -> None:
    """K5"""
    app = open_app(byte_engine("dspark+ngram"))
    for response in (app.complete(prompt=""), app.complete(prompt=[]), app.complete(prompt=["a", ""])):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
    response = app.chat(messages=[])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert app.complete(prompt="a", max_tokens=3).json()["usage"]["completion_tokens"] == 3
    assert app.bridge.health == "ok"


@pytest.mark.parametrize("kind", ["ngram", "dspark", "dspark+ngram"])
def test_speculation_is_off_for_the_request_that_says_so(open_app: OpenApp, kind: str) -> None:
    """K6: side by side, one without drafts and one with two a round at most; both texts as alone."""
    plain, app = open_app(byte_engine("plain")), open_app(byte_engine(kind))
    # With two tokens to choose from, n-gram has matches.
    body = {"temperature": 0, "max_tokens": 30, "allowed_token_ids": [97, 98], "return_speculation_stats": True}
    bodies = [{"model": "toy", "prompt": f"aabb{k}", **body, "speculation": {"num_draft_tokens": k}} for k in (0, 2)]

    async def send_all() -> Any:
        return await asyncio.gather(*(app.http.post("/v1/completions", json=body) for body in bodies))

    answers = [response.json() for response in app.run(send_all())]
    off, limited = (answer["metrics"]["speculative_decoding"] for answer in answers)
    assert (off["num_proposed_tokens"], off["num_spec_steps"], off["num_rounds"]) == (0, 0, 29)
    assert limited["num_spec_tokens"] == 2
    assert 0 < limited["num_proposed_tokens"] <= 2 * limited["num_rounds"]
    assert len(limited["acceptance_histogram"]) <= 3
    for answer, asked in zip(answers, bodies, strict=True):
        assert answer["choices"] == plain.complete(**asked).json()["choices"]
