"""The traffic of soaks: what it holds, and that it is the same again."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from dspark.evaluation.traffic import Traffic, bad_calls, canaries

TEXTS = ("one text", "another text", "a third")
DECK_LEN = 62


def calls(num_calls: int, seed: int = 0) -> list[Any]:
    return list(islice(Traffic("toy", TEXTS, max_model_len=2048, seed=seed), num_calls))


def test_traffic_follows_from_its_seed() -> None:
    assert calls(200) == calls(200)
    assert calls(200) != calls(200, seed=1)


def test_each_pass_through_the_deck_holds_the_same_kinds() -> None:
    both = calls(2 * DECK_LEN)
    first, second = (Counter(call.kind for call in half) for half in (both[:DECK_LEN], both[DECK_LEN:]))
    assert first == second
    assert (first["greedy stream"], first["bad request"], first["look"]) == (12, 4, 1)


def test_long_prompts_are_new_and_no_longer_than_half_the_context() -> None:
    prompts = [call.body["prompt"] for call in calls(4 * DECK_LEN) if call.kind == "long prompt"]
    assert len({prompt[:16] for prompt in prompts}) == len(prompts) == 8
    assert {len(prompt) for prompt in prompts} == {1024}


def test_canaries_are_greedy_or_seeded() -> None:
    bodies = [call.body for call in canaries("toy", TEXTS)]
    assert len(bodies) == 6
    assert all(body["temperature"] == 0 or "seed" in body for body in bodies)


@pytest.mark.parametrize("call", bad_calls("toy"), ids=lambda call: str(call.body)[:60])
def test_the_server_refuses_every_bad_call(app: Any, call: Any) -> None:
    response = app.post(call.path, call.body)
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["message"]


@pytest.fixture
def app() -> Any:
    from app_client import AppClient
    from fake_engine import FakeEngine

    client = AppClient(FakeEngine())
    yield client
    client.close()


def test_the_server_answers_every_good_call(app: Any) -> None:
    """With a vocabulary of bytes, and a context that holds them all; those that leave or take long are left out."""
    app.engine.max_model_len = 10_000
    left_out = ("bad request", "reads slowly")
    for call in [*calls(DECK_LEN), *canaries("toy", TEXTS)]:
        if call.kind not in left_out:
            response = app.get(call.path) if call.body is None else app.post(call.path, call.body)
            assert response.status_code == 200, (call, response.text)
