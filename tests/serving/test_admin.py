"""The routes behind the admin key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from app_client import AppClient
from toys import hashed_rule, make_engine, perfect_proposer

from dspark.engine.engine import Engine

PATH = "/admin/speculation"
KEY = "s3cret-é"
AUTHORIZED = {"authorization": f"Bearer {KEY}".encode()}
RULE = hashed_rule(16)


@pytest.fixture
def engine() -> Engine:
    return make_engine(RULE, 16, proposer=perfect_proposer(RULE))


@pytest.fixture
def app(open_app: Callable[..., AppClient], engine: Engine) -> AppClient:
    return open_app(engine, admin_key=KEY)


def get(app: AppClient) -> dict[str, Any]:
    response = app.run(app.http.get(PATH, headers=AUTHORIZED))
    assert response.status_code == 200, response.text
    return response.json()


def wait_for(app: AppClient, state: str) -> dict[str, Any]:
    """Return what GET says once the engine has carried out what was asked for."""
    for _ in range(500):
        if (answer := get(app))["state"] == state:
            return answer
        app.run(asyncio.sleep(0.01))
    raise AssertionError(f"never {state}: {get(app)}")


def test_without_a_key_there_is_no_such_route(open_app: Callable[..., AppClient], engine: Engine) -> None:
    app = open_app(engine)

    assert app.get(PATH).status_code == 404
    assert app.post(PATH, {"enabled": False}, headers=AUTHORIZED).status_code == 404


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer x{KEY}"]
)
def test_a_missing_or_wrong_key_is_refused_and_nothing_is_switched(
    app: AppClient, engine: Engine, header: str | None
) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    for response in (
        app.run(app.http.get(PATH, headers=headers)),
        app.post(PATH, {"enabled": False}, headers=headers),
    ):
        assert response.status_code == 401
        assert "Authorization: Bearer KEY" in response.json()["error"]["message"]
    assert app.bridge.wants_speculation and engine.drafting.is_switched_on


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_get_tells_what_drafts_and_whether_it_does(app: AppClient, scheme: str) -> None:
    response = app.run(app.http.get(PATH, headers={"authorization": f"{scheme} {KEY}".encode()}))

    assert response.json() == {"drafter": "function", "enabled": True, "state": "on"}


def test_get_tells_that_there_is_no_drafter(open_app: Callable[..., AppClient]) -> None:
    app = open_app(make_engine(RULE, 16), admin_key=KEY)

    assert get(app) == {"drafter": None, "enabled": False, "state": "none"}
    answer = app.post(PATH, {"enabled": True, "reset": True}, headers=AUTHORIZED)
    assert answer.json() == {"drafter": None, "enabled": False, "state": "none"}


def test_post_switches_off_and_on_again(app: AppClient) -> None:
    answer = app.post(PATH, {"enabled": False}, headers=AUTHORIZED).json()
    assert (answer["drafter"], answer["enabled"]) == ("function", False)
    assert wait_for(app, "switched_off")["enabled"] is False

    assert app.post(PATH, {"enabled": True}, headers=AUTHORIZED).json()["enabled"] is True
    assert wait_for(app, "on")["enabled"] is True


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"\xff", None),
        (b"[" * 1000, None),
        (b"[]", None),
        (b"null", None),
        (b"true", None),
        ({}, None),
        ({"enabled": "yes"}, "enabled"),
        ({"enabled": 1}, "enabled"),
        ({"enabled": None}, "enabled"),
        ({"enabled": [[[]]]}, "enabled"),
        ({"enabled": False, "more": 1}, "more"),
        ({"reset": False}, "reset"),
        ({"reset": 1}, "reset"),
        ({"enabled": False, "reset": "yes"}, "reset"),
    ],
)
def test_a_bad_body_is_refused_and_changes_nothing(
    app: AppClient, engine: Engine, body: Any, param: str | None
) -> None:
    response = app.post(PATH, body, headers=AUTHORIZED)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert '{"reset": true}' in response.json()["error"]["message"]
    assert get(app)["enabled"] is True and engine.drafting.is_switched_on


def test_a_long_body_is_refused(app: AppClient) -> None:
    assert app.post(PATH, b" " * 1025, headers=AUTHORIZED).status_code == 413


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH"])
def test_other_methods_are_refused(app: AppClient, method: str) -> None:
    assert app.run(app.http.request(method, PATH, headers=AUTHORIZED)).status_code == 405


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, None), (1.0, 7)])
def test_switching_in_the_middle_of_a_stream_changes_no_text(
    open_app: Callable[..., AppClient], app: AppClient, engine: Engine, temperature: float, seed: int | None
) -> None:
    body = {"prompt": [3, 1], "temperature": temperature, "max_tokens": 100, "ignore_eos": True}
    body |= {} if seed is None else {"seed": seed}
    plain = open_app(make_engine(RULE, 16)).complete(**body).json()["choices"][0]["text"]

    async def stream_and_switch() -> str:
        num_posts = 0
        async with asyncio.timeout(30):
            answers = [
                asyncio.create_task(app.http.post("/v1/completions", json={"model": "toy", **body})) for _ in range(4)
            ]
            while not all(answer.done() for answer in answers):
                content = json.dumps({"enabled": num_posts % 2 == 1, "reset": True}).encode()
                response = await app.http.post(PATH, content=content, headers=AUTHORIZED)
                assert response.status_code == 200
                num_posts += 1
                await asyncio.sleep(0.002)
            texts = {answer.result().json()["choices"][0]["text"] for answer in answers}
        assert num_posts > 2
        (text,) = texts
        return text

    assert app.run(stream_and_switch()) == plain
    assert engine.allocator.num_used == 0


def test_reset_makes_the_engine_forget_what_it_learned_online(
    open_app: Callable[..., AppClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = perfect_proposer(RULE)
    engine = make_engine(RULE, 16, proposer=proposer)
    forgotten: list[str] = []
    monkeypatch.setattr(proposer, "reset_calibration", lambda: forgotten.append("calibration"))
    app = open_app(engine, admin_key=KEY)

    assert app.post(PATH, {"reset": True}, headers=AUTHORIZED).json()["enabled"] is True
    assert app.complete(prompt=[1], max_tokens=2).status_code == 200
    assert forgotten == ["calibration"]
    app.post(PATH, {"enabled": False, "reset": True}, headers=AUTHORIZED)
    wait_for(app, "switched_off")
    assert app.complete(prompt=[1], max_tokens=2).status_code == 200
    assert forgotten == ["calibration"] * 2
