"""The application over a real engine with a toy target: choices, disconnects and pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sse import events
from toys import hashed_rule, make_engine, perfect_proposer

RULE = hashed_rule(16)


@pytest.fixture
def engine() -> Any:
    return make_engine(RULE, 16, proposer=perfect_proposer(RULE), eos_token_ids=[15])


def test_seeded_choices_differ_and_come_again_as_a_set(open_app: Callable[..., Any], engine: Any) -> None:
    """K4: four choices of one prompt that ends inside a page; the first is the text of n = 1."""
    app = open_app(engine)
    body = {"prompt": [1, 2, 3, 4, 5, 6], "n": 4, "temperature": 1.5, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    first, second = (app.complete(**body).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 4
    assert app.complete(**{**body, "n": 1}).json()["choices"][0]["text"] == texts[0]
    assert first["usage"]["completion_tokens"] == 48
    assert engine.allocator.num_used == 0


def test_greedy_choices_are_equal_and_end_on_their_own(open_app: Callable[..., Any], engine: Any) -> None:
    """K4"""
    choices = open_app(engine).complete(prompt=[1, 2, 3], n=4, temperature=0, max_tokens=20).json()["choices"]
    assert len({choice["text"] for choice in choices}) == 1


def test_a_stream_says_what_the_whole_answer_says(open_app: Callable[..., Any], engine: Any) -> None:
    """K3: the last chunk's usage is exact although rounds bring several tokens."""
    app = open_app(engine)
    body = {"prompt": [7, 7], "temperature": 0, "max_tokens": 17, "ignore_eos": True}
    whole = app.complete(**body).json()
    chunks = events(app.complete(**body, stream=True, stream_options={"include_usage": True}).text)
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole["choices"][0]["text"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 17
    assert len(chunks) < 10


def test_an_answer_tells_how_drafting_went_when_asked(open_app: Callable[..., Any], engine: Any) -> None:
    """Of 13 tokens the prefill gives one and two rounds give six each."""
    app = open_app(engine)
    body = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 13, "ignore_eos": True}
    assert "metrics" not in app.complete(**body).json()
    wanted = {**body, "return_speculation_stats": True}
    stats = app.complete(**wanted).json()["metrics"]["speculative_decoding"]
    assert stats == {
        "mean_acceptance_length": 6.0,
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 0, 0, 0, 0, 2],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 10,
        "num_spec_tokens": 5,
        "num_rounds": 2,
        "num_proposed_tokens": 10,
        "num_emitted_tokens": 12,
        "tokens_per_round": 6.0,
    }
    both = app.complete(**wanted, n=2).json()["metrics"]["speculative_decoding"]
    assert (both["num_spec_steps"], both["tokens_per_round"], both["acceptance_histogram"][-1]) == (4, 6.0, 4)
    plain = app.complete(**wanted, speculation={"num_draft_tokens": 0}).json()["metrics"]["speculative_decoding"]
    assert (plain["num_rounds"], plain["num_spec_steps"], plain["tokens_per_round"]) == (12, 0, 1.0)
    assert plain["mean_acceptance_length"] is plain["draft_acceptance_rate"] is None


@pytest.mark.parametrize("has_usage", [False, True])
def test_a_stream_tells_how_drafting_went_in_its_last_chunk(
    open_app: Callable[..., Any], engine: Any, has_usage: bool
) -> None:
    app = open_app(engine)
    body = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 13, "return_speculation_stats": True}
    whole = app.complete(**body).json()
    options = {"stream_options": {"include_usage": True}} if has_usage else {}
    *chunks, last = events(app.complete(**body, stream=True, **options).text)
    assert last["choices"] == []
    assert last["metrics"] == whole["metrics"]
    assert last.get("usage") == (whole["usage"] if has_usage else None)
    assert not any("metrics" in chunk for chunk in chunks)


def test_a_client_that_leaves_frees_its_pages_and_the_next_answer_is_a_fresh_engines(
    open_app: Callable[..., Any], engine: Any
) -> None:
    """K7"""
    app = open_app(engine)
    fresh = open_app(make_engine(RULE, 16)).complete(prompt=[4, 5], temperature=0, max_tokens=9).json()

    async def leave_after_two_chunks() -> None:
        body = {"model": "toy", "prompt": [1], "temperature": 0, "max_tokens": 100, "ignore_eos": True, "stream": True}
        request = app.http.build_request("POST", "/v1/completions", json=body)
        response = asyncio.create_task(app.http.send(request, stream=True))
        await asyncio.sleep(0.02)
        response.cancel()
        await asyncio.gather(response, return_exceptions=True)
        for _ in range(200):
            if not engine.has_unfinished():
                return
            await asyncio.sleep(0.01)

    app.run(leave_after_two_chunks())
    assert not engine.has_unfinished()
    assert engine.allocator.num_used == 0
    answer = app.complete(prompt=[4, 5], temperature=0, max_tokens=9).json()
    assert answer["choices"] == fresh["choices"]
