"""Answers that must be calls, or calls that must follow a schema, by a model that would write anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from app_client import AppClient
from sse import events
from structure_cases import END, SpellingTokenizer, engine_over_words
from toys import hashed_rule, random_proposer, soft_proposer

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
WORDS = [*MARKS, *(chr(code) for code in range(0x20, 0x7F)), "\n", '{"name": "', '", "arguments": {', '"}}', END]
RULE = hashed_rule(len(WORDS))
TEMPLATE = '{{ tools }} <tool_call>\n{"name": name, "arguments": arguments}\n</tool_call>'
THINKING_TEMPLATE = TEMPLATE + " </think>"


def function(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


CITY = {"city": {"enum": ["Rome", "Oslo", "Bern"]}}
TOOLS = [function("get_weather", CITY), function("now", {})]


class ChatTokenizer(SpellingTokenizer):
    """Renders any chat as a few tokens."""

    has_chat_template = True
    takes_tools = True

    def __init__(self, template: str, prompt: tuple[str, ...]) -> None:
        super().__init__(WORDS)
        self.chat_template = self.tool_chat_template = template
        self._prompt = prompt

    def render_chat(self, messages: Any, **options: Any) -> list[int]:
        return self.ids(*self._prompt)


@pytest.fixture
def open_chat(open_app: Callable[..., AppClient]) -> Callable[..., AppClient]:
    def open_chat(template: str = TEMPLATE, prompt: tuple[str, ...] = ("h", "i"), proposer: Any = None) -> AppClient:
        engine = engine_over_words(WORDS, RULE, proposer=proposer, max_model_len=256)
        engine.tokenizer = ChatTokenizer(template, prompt)  # type: ignore[assignment]
        return open_app(engine)

    return open_chat


def calls_of(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]


def streamed_calls(chunks: list[dict[str, Any]]) -> list[list[str]]:
    calls: list[list[str]] = []
    for chunk in chunks:
        for call in chunk["choices"][0]["delta"].get("tool_calls", []):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return calls


NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_the_answer_is_calls_of_the_tools_that_may_be_called(
    open_chat: Callable[..., AppClient], tool_choice: Any, seed: int
) -> None:
    body = {"tools": TOOLS, "tool_choice": tool_choice, "parallel_tool_calls": False, "seed": seed}
    choice = open_chat().chat(**body).json()["choices"][0]
    ((name, arguments),) = calls_of(choice["message"])
    assert (name, arguments.get("city", "")) in [("get_weather", city) for city in CITY["city"]["enum"]] + [("now", "")]
    assert name == "now" or tool_choice == "required"
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("proposer", [random_proposer(len(WORDS)), soft_proposer(RULE, len(WORDS))])
@pytest.mark.parametrize("temperature", [0, 1])
def test_forced_calls_are_those_of_plain_decoding_streamed_or_not(
    open_chat: Callable[..., AppClient], proposer: Any, temperature: int
) -> None:
    plain, drafted = open_chat(), open_chat(proposer=proposer)
    for seed in range(4):
        body = {"tools": TOOLS, "tool_choice": "required", "temperature": temperature, "seed": seed, "max_tokens": 150}
        body |= {"return_token_ids": True}
        expected, found = (app.chat(**body).json() for app in (plain, drafted))
        assert found["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        calls = [c["function"] for c in expected["choices"][0]["message"]["tool_calls"]]
        assert [c["function"] for c in found["choices"][0]["message"]["tool_calls"]] == calls
        *chunks, last = events(drafted.chat(**body, stream=True, stream_options={"include_usage": True}).text)
        assert streamed_calls(chunks) == [[c["name"], c["arguments"]] for c in calls]
        assert last["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prompt", [("h", "i"), ("h", "i", "<think>", "\n")])
def test_a_reasoning_model_may_think_before_its_call(
    open_chat: Callable[..., AppClient], prompt: tuple[str, ...], seed: int
) -> None:
    """G3: the call must come right behind the end of the section."""
    app = open_chat(THINKING_TEMPLATE, prompt)
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
    # The toy would think for ever: the end of the section is the likeliest token by far, once it may come.
    body["logit_bias"] = {str(WORDS.index("</think>")): 6, str(WORDS.index("<think>")): 6}
    answer = app.chat(**body).json()
    message = answer["choices"][0]["message"]
    assert len(calls_of(message)) == 1
    assert message["content"] is None
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prompt", [("h", "i"), ("h", "i", "<think>", "\n")])
def test_a_reasoning_model_may_think_before_what_the_response_format_asks_for(
    open_chat: Callable[..., AppClient], prompt: tuple[str, ...], seed: int
) -> None:
    """G3"""
    schema = TOOLS[0]["function"]["parameters"]
    body: dict[str, Any] = {"seed": seed}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body["logit_bias"] = {str(WORDS.index("</think>")): 6, str(WORDS.index("<think>")): 6}
    message = open_chat(THINKING_TEMPLATE, prompt).chat(**body).json()["choices"][0]["message"]
    assert json.loads(message["content"])["city"] in CITY["city"]["enum"]


@pytest.mark.parametrize("seed", range(6))
def test_strict_tools_get_arguments_of_their_schema_when_they_are_called(
    open_chat: Callable[..., AppClient], seed: int
) -> None:
    tools = [function("get_weather", CITY, strict=True)]
    body: dict[str, Any] = {"tools": tools, "seed": seed, "max_tokens": 120}
    body["logit_bias"] = {str(WORDS.index("<tool_call>")): 8, str(WORDS.index(END)): 3}
    choice = open_chat().chat(**body).json()["choices"][0]
    if choice["finish_reason"] == "tool_calls":
        calls = calls_of(choice["message"])
        assert calls
        assert all(arguments["city"] in CITY["city"]["enum"] for _, arguments in calls)
    assert "<tool_call>" not in (choice["message"]["content"] or "")


@pytest.mark.parametrize("seed", range(6))
def test_with_tools_and_a_response_format_the_answer_is_calls_or_of_the_format(
    open_chat: Callable[..., AppClient], seed: int
) -> None:
    body: dict[str, Any] = {"tools": [TOOLS[1]], "seed": seed, "parallel_tool_calls": False}
    schema = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    message = open_chat().chat(**body).json()["choices"][0]["message"]
    if "tool_calls" in message:
        assert message["content"] is None
    else:
        assert json.loads(message["content"])["city"] in CITY["city"]["enum"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [function("f", {"a": {"type": "nonsense"}})], "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar"),
    ],
)
def test_what_cannot_be_forced_is_refused_by_name(
    open_chat: Callable[..., AppClient], fields: dict[str, Any], param: str
) -> None:
    response = open_chat().chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
