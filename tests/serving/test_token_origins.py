"""`return_token_origins` over HTTP: whole answers and streams, several choices, text unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sse import events
from toys import hashed_rule, make_engine, right_until_proposer

RULE = hashed_rule(16)
BODY = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 6, "return_token_ids": True, "return_token_origins": True}
WANTED = [
    {"kind": "plain", "proposer": None},
    {"kind": "accepted", "proposer": "function"},
    {"kind": "accepted", "proposer": "function"},
    {"kind": "corrected", "proposer": "function"},
    {"kind": "accepted", "proposer": "function"},
    {"kind": "bonus", "proposer": "function"},
]


@pytest.fixture
def app(open_app: Callable[..., Any]) -> Any:
    return open_app(make_engine(RULE, 16, proposer=right_until_proposer(RULE, 16, 2), num_draft_tokens=4))


def test_a_choice_says_of_each_token_how_it_came_to_be(app: Any) -> None:
    choice = app.complete(**BODY).json()["choices"][0]
    assert choice["token_origins"] == WANTED
    assert len(choice["token_ids"]) == len(WANTED)


def test_without_being_asked_it_says_nothing_and_the_text_is_the_same(app: Any) -> None:
    asked = app.complete(**BODY).json()["choices"][0]
    unasked = app.complete(**{**BODY, "return_token_origins": None}).json()["choices"][0]
    assert unasked == {name: value for name, value in asked.items() if name != "token_origins"}


def test_each_chunk_has_the_origins_of_its_tokens(app: Any) -> None:
    chunks = [chunk["choices"][0] for chunk in events(app.complete(**BODY, stream=True).text)]
    assert [origin for chunk in chunks for origin in chunk["token_origins"]] == WANTED
    assert all(len(chunk["token_ids"]) == len(chunk["token_origins"]) for chunk in chunks)


def test_tokens_whose_text_is_held_back_bring_their_origins_at_once(app: Any) -> None:
    """A stop string that may have begun holds the text back, never the origins."""
    whole = app.complete(**BODY).json()["choices"][0]["text"]
    body = {**BODY, "stop": [whole + "x"], "return_token_ids": False, "stream": True}
    chunks = [chunk["choices"][0] for chunk in events(app.complete(**body).text)]
    assert [len(chunk["token_origins"]) for chunk in chunks] == [1, 3, 2]
    assert [chunk["text"] for chunk in chunks] == ["", "", whole]


def test_every_choice_has_its_own(app: Any) -> None:
    choices = app.complete(**{**BODY, "n": 2, "temperature": 1, "seed": 3}).json()["choices"]
    assert [len(choice["token_origins"]) for choice in choices] == [6, 6]


def test_anything_but_a_boolean_is_refused_by_name(app: Any) -> None:
    response = app.complete(**{**BODY, "return_token_origins": "yes"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "return_token_origins")
