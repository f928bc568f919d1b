"""What the grammars of calls let through, by llguidance itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from byte_tokenizers import EOS_ID, byte_level_backend
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from dspark.serving.answer_grammars import AnswerGrammar, content_rule
from dspark.serving.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS, TOOL_FORMATS, ToolFormat
from dspark.structure import Structure

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
PARAMETERS = {"get_weather": CITY, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
W = '{"name": "get_weather", "arguments": {"city": "Pa\\"}é"}}'
NOW = '{"name": "now", "arguments": {}}'
LW, LNOW = (text.replace("arguments", "parameters") for text in (W, NOW))

HERMES_W, HERMES_NOW = (f"<tool_call>\n{call}\n</tool_call>" for call in (W, NOW))
# Right answers of calls alone: one call, and several.
ONE = {
    "hermes": [HERMES_W, HERMES_NOW],
    "llama3_json": [LW, LNOW],
    "mistral": [f"[TOOL_CALLS][{W}]", f"[TOOL_CALLS] [{NOW}]"],
    "mistral_args": ['[TOOL_CALLS]get_weather[ARGS]{"city": "x"}', "[TOOL_CALLS]now[ARGS]{}"],
}
SEVERAL = {
    "hermes": [f"{HERMES_W}\n{HERMES_NOW}\n{HERMES_W}"],
    "llama3_json": [f"{LW}; {LNOW}"],
    "mistral": [f"[TOOL_CALLS][{W}, {NOW}]"],
    "mistral_args": ['[TOOL_CALLS]get_weather[ARGS]{"city": "x"}[TOOL_CALLS]now[ARGS]{}'],
}


@lru_cache
def tokenizer(*special_tokens: str) -> tuple[Tokenizer, LLTokenizer, dict[str, int]]:
    """Return a byte-level tokenizer in which these are tokens of their own."""
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    ids = {token: backend.token_to_id(token) for token in special_tokens}
    return backend, LLTokenizer(backend.to_str(), eos_token=EOS_ID), ids


def marks(tool_format: ToolFormat, has_mark_tokens: bool) -> tuple[str, ...]:
    reasoning = ("<think>", "</think>")
    return (*tool_format.marks, *reasoning) if has_mark_tokens else ()


def accepts(tool_format: ToolFormat | None, text: str, *, has_mark_tokens: bool = True, **options: Any) -> bool:
    """Return whether `text` is a whole answer for the grammar; without a format there are no tools."""
    backend, llguidance_tokenizer, ids = tokenizer(*marks(tool_format or HERMES, has_mark_tokens))
    options = {"is_required": True, "parameters": PARAMETERS} | options if tool_format is not None else options
    grammar = AnswerGrammar(tool_format=tool_format, mark_token_ids=ids, **options)
    matcher = LLMatcher(llguidance_tokenizer, LLMatcher.grammar_from_lark(grammar.text))
    assert not matcher.is_error(), matcher.get_error()
    token_ids = backend.encode(text).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


EVERY_FORMAT = pytest.mark.parametrize("tool_format", TOOL_FORMATS.values(), ids=lambda f: f.name)
WITH_AND_WITHOUT_MARK_TOKENS = pytest.mark.parametrize("has_mark_tokens", [True, False])


@EVERY_FORMAT
@WITH_AND_WITHOUT_MARK_TOKENS
def test_required_calls_are_what_the_format_writes(tool_format: ToolFormat, has_mark_tokens: bool) -> None:
    for text in (*ONE[tool_format.name], *SEVERAL[tool_format.name]):
        assert accepts(tool_format, text, has_mark_tokens=has_mark_tokens)


@EVERY_FORMAT
def test_nothing_but_calls_of_the_tools_is_a_required_call(tool_format: ToolFormat) -> None:
    call = ONE[tool_format.name][0]
    wrong = ["", "Hello", f"Hello {call}", f"{call} Hello", call[:-1], call.replace("get_weather", "other")]
    wrong += [call.replace('"city"', '"town"'), call.replace('"city": ', '"city": 1')]
    for text in wrong:
        assert not accepts(tool_format, text)


@EVERY_FORMAT
def test_only_the_named_tool_can_be_called(tool_format: ToolFormat) -> None:
    weather, now = ONE[tool_format.name]
    only_now = {"now": PARAMETERS["now"]}
    assert accepts(tool_format, now, parameters=only_now)
    assert not accepts(tool_format, weather, parameters=only_now)


@EVERY_FORMAT
@WITH_AND_WITHOUT_MARK_TOKENS
@pytest.mark.parametrize("is_required", [True, False])
def test_without_parallel_calls_there_is_one(tool_format: ToolFormat, has_mark_tokens: bool, is_required: bool) -> None:
    options = {"has_mark_tokens": has_mark_tokens, "is_required": is_required, "is_parallel": False}
    for text in ONE[tool_format.name]:
        assert accepts(tool_format, text, **options)
    for text in SEVERAL[tool_format.name]:
        assert not accepts(tool_format, text, **options)


@EVERY_FORMAT
@WITH_AND_WITHOUT_MARK_TOKENS
def test_optional_calls_may_stand_in_any_text(tool_format: ToolFormat, has_mark_tokens: bool) -> None:
    options = {"has_mark_tokens": has_mark_tokens, "is_required": False}
    for text in ("", "Hello [1] <b> \n", *ONE[tool_format.name], *SEVERAL[tool_format.name]):
        assert accepts(tool_format, text, **options)
    marked = f"<|python_tag|>{LW}" if tool_format is LLAMA3_JSON else ONE[tool_format.name][0]
    assert accepts(tool_format, f"Let me see. {marked}", **options)


@EVERY_FORMAT
@WITH_AND_WITHOUT_MARK_TOKENS
def test_what_begins_like_an_optional_call_is_one(tool_format: ToolFormat, has_mark_tokens: bool) -> None:
    options = {"has_mark_tokens": has_mark_tokens, "is_required": False}
    call = ONE[tool_format.name][0]
    wrong = [call.replace("get_weather", "other"), call.replace('"city"', '"town"'), f"Hi {tool_format.start} now"]
    for text in wrong:
        assert not accepts(tool_format, text, **options)


def test_an_answer_that_begins_with_a_brace_is_a_call_where_calls_need_no_mark() -> None:
    assert not accepts(LLAMA3_JSON, '{"city": "Paris"}', is_required=False)
    assert not accepts(LLAMA3_JSON, "\n{", is_required=False)
    assert accepts(LLAMA3_JSON, "So: {", is_required=False)


@WITH_AND_WITHOUT_MARK_TOKENS
def test_a_reasoning_section_may_come_first(has_mark_tokens: bool) -> None:
    options = {"has_mark_tokens": has_mark_tokens, "has_reasoning": True}
    for text in (HERMES_W, f"<think>\nHm.\n</think>\n\n{HERMES_W}", f"<think></think>{HERMES_W}"):
        assert accepts(HERMES, text, **options)
    for text in ("<think>\nHm.\n</think>\n\nHello", f"Hm.</think>{HERMES_W}", "<think>Hm."):
        assert not accepts(HERMES, text, **options)
    assert accepts(HERMES, "<think>a</think>Hello", is_required=False, **options)
    assert not accepts(HERMES, "<think>a</think>Hello <tool_call>x", is_required=False, **options)


@WITH_AND_WITHOUT_MARK_TOKENS
def test_a_reasoning_section_that_the_prompt_has_begun_must_end(has_mark_tokens: bool) -> None:
    options = {"has_mark_tokens": has_mark_tokens, "has_reasoning": True, "is_reasoning_open": True}
    assert accepts(HERMES, f"\nHm.\n</think>\n\n{HERMES_W}", **options)
    assert accepts(HERMES, "Hm.</think>Hello", is_required=False, **options)
    assert not accepts(HERMES, HERMES_W, **options)
    assert not accepts(HERMES, "Hm.", is_required=False, **options)
    assert not accepts(HERMES, "Hm.</think>Hello", **options)


def test_arguments_without_a_strict_schema_are_any_object() -> None:
    options = {"parameters": {"get_weather": {"type": "object"}}, "is_required": False}
    assert accepts(HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"x": [1]}}\n</tool_call>', **options)
    assert not accepts(HERMES, '<tool_call>\n{"name": "get_weather", "arguments": 1}\n</tool_call>', **options)


def test_schemas_may_refer_to_their_own_definitions() -> None:
    schema = {
        "type": "object",
        "properties": {"t": {"$ref": "#/$defs/t"}},
        "required": ["t"],
        "$defs": {"t": {"enum": ["a"]}},
    }
    options = {"parameters": {"f": schema}}
    for tool_format, text in (
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"t": "%s"}}]'),
        (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"t": "%s"}'),
    ):
        assert accepts(tool_format, text % "a", **options)
        assert not accepts(tool_format, text % "b", **options)


@pytest.mark.parametrize(
    ("structure", "right", "wrong"),
    [
        (Structure.json_schema(CITY), ['{"city": "x"}', '{"city":"x"}'], ["{}", "x"]),
        (Structure.regex(r"a/b|c\/d|e\nf|g\\/h"), ["a/b", "c/d", "e\nf", "g\\/h"], ["a", "a/bx", ""]),
        (Structure.regex("a\nb"), ["a\nb"], ["a", "ab"]),
        (Structure.choice(["yes", 'n"é\\o']), ["yes", 'n"é\\o'], ["no", ""]),
    ],
)
def test_content_of_a_structure_follows_the_reasoning_or_comes_in_place_of_calls(
    structure: Structure, right: list[str], wrong: list[str]
) -> None:
    content = content_rule(structure)
    for text in right:
        assert accepts(HERMES, text, content=content, is_required=False)
        assert accepts(None, text, content=content, has_reasoning=True)
        assert accepts(HERMES, f"<think>a</think>\n\n{text}", content=content, is_required=False, has_reasoning=True)
    for text in wrong:
        assert not accepts(HERMES, text, content=content, is_required=False)
        assert not accepts(HERMES, f"<think>a</think>{text}", content=content, is_required=False, has_reasoning=True)
    assert not accepts(None, HERMES_W, content=content, has_reasoning=True)
    assert accepts(HERMES, HERMES_W, content=content, is_required=False)
    assert accepts(LLAMA3_JSON, LW, content=content, is_required=False)


def test_a_grammar_of_the_users_is_no_rule_of_content() -> None:
    assert content_rule(Structure.grammar('start: "a"')) is None
