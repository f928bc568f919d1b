"""Random bodies: whatever comes in, the answer is a 200 or a 4xx in the right shape, and the next call works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from app_client import AppClient
from byte_tokenizers import ToyTokenizer, byte_level_backend
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from sse import events

from dspark.serving.protocol import ChatCompletionRequest, CompletionRequest

FIELDS = {
    "/v1/completions": sorted({*CompletionRequest.model_fields, *CompletionRequest.neutral}),
    "/v1/chat/completions": sorted({*ChatCompletionRequest.model_fields, *ChatCompletionRequest.neutral}),
}
GOOD = {
    "/v1/completions": {"model": "toy", "prompt": "hi"},
    "/v1/chat/completions": {"model": "toy", "messages": [{"role": "user", "content": "hi"}]},
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 20),
    st.integers(),
    st.floats(allow_nan=True),
    st.floats(0, 1),
    st.text(max_size=8),
    st.sampled_from(["toy", "user", "text", "auto", "\ud800", "none", "", 2**63, 10**400, 1e308]),
    st.sampled_from(["assistant", "tool", "function", "required", "{}"]),
)
KEYS = st.one_of(
    st.text(max_size=5),
    st.sampled_from(["role", "content", "type", "text", "name", "num_draft_tokens", "include_usage", "tool_calls"]),
    st.sampled_from(["function", "arguments", "parameters", "strict", "id", "tool_call_id", "reasoning"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def app() -> Iterator[AppClient]:
    template = "{{ tools }} tool_calls <tool_call> <think></think>"
    client = AppClient(FakeEngine(tokenizer=ToyTokenizer(byte_level_backend(), chat_template=template)))
    yield client
    client.close()


def check(app: AppClient, path: str, body: bytes) -> None:
    response = app.post(path, body)
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert "error" not in events(response.text)[0]
    assert app.post(path, GOOD[path]).status_code == 200
    assert app.bridge.health == "ok"


@pytest.mark.parametrize("path", GOOD)
def test_random_values_in_known_fields_never_break_the_server(app: AppClient, path: str) -> None:
    @settings(max_examples=200, deadline=None)
    @given(st.dictionaries(st.sampled_from(FIELDS[path]), VALUES, max_size=4))
    def run(fields: dict[str, Any]) -> None:
        check(app, path, json.dumps({**GOOD[path], **fields}).encode())

    run()


@pytest.mark.parametrize("path", GOOD)
def test_random_json_never_breaks_the_server(app: AppClient, path: str) -> None:
    @settings(max_examples=100, deadline=None)
    @given(st.one_of(VALUES, st.dictionaries(KEYS, VALUES, max_size=5).map(lambda extra: {**GOOD[path], **extra})))
    def run(value: Any) -> None:
        check(app, path, json.dumps(value).encode())

    run()


@pytest.mark.parametrize("path", GOOD)
def test_random_bytes_never_break_the_server(app: AppClient, path: str) -> None:
    @settings(max_examples=100, deadline=None)
    @given(st.binary(max_size=40))
    def run(body: bytes) -> None:
        check(app, path, body)

    run()
