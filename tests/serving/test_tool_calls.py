"""Taking answers apart into content and tool calls, for every way in which the text may be cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.serving.reasoning import Content
from dspark.serving.tool_calls import CallArguments, CallBegin, CallPart, ToolCallParser
from dspark.serving.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS, ToolFormat

NAMES = ("get_weather", "now", "run-2")
FORMATS = (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS)

# What an answer is made of: (content, calls with their arguments, whether the last call is cut).
Read = tuple[str, list[tuple[str, str]], bool]


def read(tool_format: ToolFormat, chunks: Iterable[str], max_calls: int | None = None) -> Read:
    """Put the parts of an answer together, as a client does with a stream."""
    parser = ToolCallParser(tool_format, NAMES, max_calls=max_calls)
    parts: list[CallPart] = [part for chunk in chunks for part in parser.push(chunk)]
    parts += parser.finish()
    content, calls = "", []
    for part in parts:
        if isinstance(part, Content):
            assert part.text
            content += part.text
        elif isinstance(part, CallBegin):
            assert part.index == len(calls)
            calls.append((part.name, ""))
        else:
            assert part.index == len(calls) - 1
            assert part.text
            name, arguments = calls.pop()
            calls.append((name, arguments + part.text))
    return content, calls, parser.is_cut


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


W = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
NOW = '{"name": "now", "arguments": {}}'
PARIS = ("get_weather", '{"city": "Paris"}')
AWKWARD = '{"a": "}] \\"</tool_call>; [TOOL_CALLS] {", "b": [{"c": [1, -2.5e3, null]}, "é世😀\\u00e9\\\\"], "d": {}}'

HERMES_CASES: dict[str, tuple[str, Read]] = {
    "content alone": ("Hello, world!\n", ("Hello, world!\n", [], False)),
    "nothing": ("", ("", [], False)),
    "white space alone": (" \n ", (" \n ", [], False)),
    "one call": (f"<tool_call>\n{W}\n</tool_call>", ("", [PARIS], False)),
    "two calls, one without arguments": (
        f"<tool_call>\n{W}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>",
        ("", [PARIS, ("now", "{}")], False),
    ),
    "calls without anything between them": (
        f"<tool_call>{NOW}</tool_call><tool_call>{NOW}</tool_call>",
        ("", [("now", "{}")] * 2, False),
    ),
    "no arguments member": ('<tool_call>{"name": "now"}</tool_call>', ("", [("now", "{}")], False)),
    "arguments first": (
        '<tool_call>{"arguments": {"x": "{"}, "name": "run-2"}</tool_call>',
        ("", [("run-2", '{"x": "{"}')], False),
    ),
    "parameters for arguments": (
        '<tool_call>{"type": "function", "name": "now", "parameters": {"a": 1}}</tool_call>',
        ("", [("now", '{"a": 1}')], False),
    ),
    "spaces and line breaks everywhere": (
        '<tool_call> \n { "name" :\t"now" , \n"arguments" : { "a" : 1 } } \n </tool_call> \n',
        ("", [("now", '{ "a" : 1 }')], False),
    ),
    "content before": (f"Let me look.\n\n<tool_call>\n{W}\n</tool_call>", ("Let me look.", [PARIS], False)),
    "content before and after": (
        f"A <tool_call>{NOW}</tool_call> B \n<tool_call>{NOW}</tool_call>\n",
        ("A B", [("now", "{}")] * 2, False),
    ),
    "content after alone": (f"<tool_call>{NOW}</tool_call>\n\nDone. ", ("Done.", [("now", "{}")], False)),
    "braces, quotes, marks and other scripts in strings": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {AWKWARD}}}\n</tool_call>',
        ("", [("get_weather", AWKWARD)], False),
    ),
    "an escaped name": ('<tool_call>{"name": "n\\u006fw"}</tool_call>', ("", [("now", "{}")], False)),
    "raw control characters in a string": (
        '<tool_call>{"name": "now", "arguments": {"a": "x\ny\t\\\n"}}</tool_call>',
        ("", [("now", '{"a": "x\\u000ay\\u0009\\u000a"}')], False),
    ),
    "what looks like a mark": ("a <tool_cal <<tool_ <tool_callx> b", ("a <tool_cal <<tool_ <tool_callx> b", [], False)),
    "the end of a mark at the end": ("a \n<tool_cal", ("a \n<tool_cal", [], False)),
    "a mark after the beginning of one": (f"<tool_<tool_call>{NOW}</tool_call>", ("<tool_", [("now", "{}")], False)),
    "a mark without a call": ("a <tool_call> b", ("a <tool_call> b", [], False)),
    "a mark and a call": (f"<tool_call><tool_call>{NOW}</tool_call>", ("<tool_call>", [("now", "{}")], False)),
    "an unknown tool": (
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        ('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', [], False),
    ),
    "an unknown member before the arguments": (
        '<tool_call>{"name": "now", "age": 3}</tool_call>',
        ('<tool_call>{"name": "now", "age": 3}</tool_call>', [], False),
    ),
    "no object": ("<tool_call>now()</tool_call>", ("<tool_call>now()</tool_call>", [], False)),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [], False)),
    "arguments that are no object": (
        '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
        ('<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', [], False),
    ),
    "cut before the arguments": (
        '<tool_call>\n{"name": "now", "argu',
        ('<tool_call>\n{"name": "now", "argu', [], False),
    ),
    "cut in the arguments": ('<tool_call>{"name": "now", "arguments": {"a": "b', ("", [("now", '{"a": "b')], True)),
    "cut after the arguments": (f"<tool_call>\n{NOW[:-1]}", ("", [("now", "{}")], False)),
    "cut in the end mark": (f"Hi<tool_call>\n{NOW}\n</tool_", ("Hi\n</tool_", [("now", "{}")], False)),
    "no end mark": (f"<tool_call>{NOW}", ("", [("now", "{}")], False)),
    "a brace too few": (f"<tool_call>{NOW[:-1]}\n</tool_call>", ("", [("now", "{}")], False)),
    "a brace too many": (f"<tool_call>{NOW}}}</tool_call>", ("}</tool_call>", [("now", "{}")], False)),
    "arguments that do not end": (
        f'<tool_call>{{"name": "now", "arguments": {{"a": [1</tool_call><tool_call>{NOW}</tool_call>',
        ("", [("now", '{"a": [1'), ("now", "{}")], True),
    ),
    "further members": (
        '<tool_call>{"name": "now", "arguments": {}, "id": "x", "extra": [{"a": "]"}], "more": 1.5}</tool_call>',
        ("", [("now", "{}")], False),
    ),
    "something else for a further member": (
        '<tool_call>{"name": "now", "arguments": {}, "id" x</tool_call>',
        (', "id" x</tool_call>', [("now", "{}")], False),
    ),
}
LW, LNOW = W.replace("arguments", "parameters"), NOW.replace("arguments", "parameters")
LLAMA_CASES: dict[str, tuple[str, Read]] = {
    "content alone": ("Hello; {world}\n", ("Hello; {world}\n", [], False)),
    "one call": (LW, ("", [PARIS], False)),
    "after the mark": (f"<|python_tag|>{LW}", ("", [PARIS], False)),
    "content and the mark": (f"I look. <|python_tag|>{LW}", ("I look.", [PARIS], False)),
    "two calls": (f"{LW}; {LNOW}", ("", [PARIS, ("now", "{}")], False)),
    "two calls after the mark": (f" <|python_tag|> {LW};{LNOW}\n", ("", [PARIS, ("now", "{}")], False)),
    "two calls, each after a mark": (f"{LW}<|python_tag|>{LNOW}", ("", [PARIS, ("now", "{}")], False)),
    "a separator without a call": (f"{LW}; and", ("; and", [PARIS], False)),
    "an answer in JSON": ('{"city": "Paris", "name": "now"}', ('{"city": "Paris", "name": "now"}', [], False)),
    "a person in JSON": ('{"name": "Ann", "age": 3}', ('{"name": "Ann", "age": 3}', [], False)),
    "an unfinished answer in JSON": ('\n{"name": "no', ('\n{"name": "no', [], False)),
    "a call of another kind": ('<|python_tag|>search.call("x")', ('<|python_tag|>search.call("x")', [], False)),
    "a call after content": (f"Now: {LW}", (f"Now: {LW}", [], False)),
}
MISTRAL_CASES: dict[str, tuple[str, Read]] = {
    "content alone": ("[1, 2] [TOOL", ("[1, 2] [TOOL", [], False)),
    "one call": (f"[TOOL_CALLS] [{W}]", ("", [PARIS], False)),
    "two calls": (f"[TOOL_CALLS][{W}, {NOW}]", ("", [PARIS, ("now", "{}")], False)),
    "calls with ids": (
        '[TOOL_CALLS] [{"name": "now", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "now", "arguments": {}}]',
        ("", [("now", '{"a": 1}'), ("now", "{}")], False),
    ),
    "content before": (f"Sure. [TOOL_CALLS] [{NOW}]", ("Sure.", [("now", "{}")], False)),
    "a list without calls": ("[TOOL_CALLS] [1, 2]", ("[TOOL_CALLS] [1, 2]", [], False)),
    "a list that ends in something else": (f"[TOOL_CALLS] [{NOW}, 2]", (", 2]", [("now", "{}")], False)),
    "a name and arguments": (
        '[TOOL_CALLS]now[ARGS]{"a": "}[TOOL_CALLS]"}',
        ("", [("now", '{"a": "}[TOOL_CALLS]"}')], False),
    ),
    "two names": (
        '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
        ("", [("now", "{}"), PARIS], False),
    ),
    "a name with an id": ("[TOOL_CALLS]now[CALL_ID]Ab1[ARGS]{}", ("", [("now", "{}")], False)),
    "a name without a mark after it": ('[TOOL_CALLS]now {"a": 1}', ("", [("now", '{"a": 1}')], False)),
    "an unknown name": ("[TOOL_CALLS]other[ARGS]{}", ("[TOOL_CALLS]other[ARGS]{}", [], False)),
    "no arguments": ("[TOOL_CALLS]now[ARGS]", ("[TOOL_CALLS]now[ARGS]", [], False)),
    "a long name": (f"[TOOL_CALLS]{'x' * 300}{{}}", (f"[TOOL_CALLS]{'x' * 300}{{}}", [], False)),
    "cut arguments": ('[TOOL_CALLS]now[ARGS]{"a"', ("", [("now", '{"a"')], True)),
    "arguments that become something else": ('[TOOL_CALLS]now[ARGS]{"a": <b', ("<b", [("now", '{"a": ')], True)),
    "text after a name's arguments": ("[TOOL_CALLS]now[ARGS]{} ok", ("ok", [("now", "{}")], False)),
}
CASES = [
    pytest.param(tool_format, text, expected, id=f"{tool_format.name}-{name}")
    for tool_format, cases in (
        (HERMES, HERMES_CASES),
        (LLAMA3_JSON, LLAMA_CASES),
        (MISTRAL, MISTRAL_CASES),
        (MISTRAL_ARGS, MISTRAL_CASES),
    )
    for name, (text, expected) in cases.items()
]


@pytest.mark.parametrize(("tool_format", "text", "expected"), CASES)
def test_an_answer_is_read_the_same_however_it_is_cut(tool_format: ToolFormat, text: str, expected: Read) -> None:
    """G4: whole, at every position, in chunks of 1 to 9 characters."""
    assert read(tool_format, [text]) == expected
    for position in range(len(text) + 1):
        assert read(tool_format, [text[:position], text[position:]]) == expected
    for size in range(1, 10):
        assert read(tool_format, cut(text, size)) == expected


def pieces(tool_format: ToolFormat) -> list[str]:
    """Return pieces of which texts that are nearly calls are made."""
    marks = [*tool_format.marks, tool_format.start[:-1], tool_format.start[:2], "</tool", ";", ", ", "[", "]", "{", "}"]
    return [*marks, W, NOW, LW, W[:20], W[20:], '"', "\\", "now", "\n", " ", "text", '{"name": ', '"arguments": {', "é"]


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda f: f.name)
def test_no_cut_of_any_text_changes_how_it_is_read(tool_format: ToolFormat) -> None:
    """G4, for texts that are nearly calls."""

    @settings(max_examples=120, deadline=None)
    @given(st.lists(st.sampled_from(pieces(tool_format)), max_size=12).map("".join), st.data())
    def run(text: str, data: st.DataObject) -> None:
        whole = read(tool_format, [text])
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        bounds = [0, *cuts, len(text)]
        assert read(tool_format, [text[a:b] for a, b in itertools.pairwise(bounds)]) == whole
        assert read(tool_format, text) == whole

    run()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3)))


def written(tool_format: ToolFormat, calls: Sequence[tuple[str, dict[str, Any]]], *, is_ascii: bool) -> str:
    """Write calls as a model of that format does."""
    objects = [
        json.dumps({"name": name, tool_format.arguments_key: arguments}, ensure_ascii=is_ascii)
        for name, arguments in calls
    ]
    if tool_format is HERMES:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    if tool_format is LLAMA3_JSON:
        return "; ".join(objects)
    if tool_format is MISTRAL:
        return f"[TOOL_CALLS] [{', '.join(objects)}]" if calls else ""
    return "".join(
        f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=is_ascii)}" for name, arguments in calls
    )


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda f: f.name)
def test_well_formed_calls_come_back_whatever_their_arguments(tool_format: ToolFormat) -> None:
    @settings(max_examples=60, deadline=None)
    @given(CALLS, st.booleans(), st.integers(1, 9))
    def run(calls: list[tuple[str, dict[str, Any]]], is_ascii: bool, size: int) -> None:
        text = written(tool_format, calls, is_ascii=is_ascii)
        content, found, is_cut = read(tool_format, cut(text, size))
        assert (content, is_cut) == ("", False)
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls

    run()


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda f: f.name)
def test_text_without_a_mark_is_content_as_it_is(tool_format: ToolFormat) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.text(alphabet=st.characters(codec="utf-8") | st.sampled_from("<[{ \n"), max_size=30), st.integers(1, 4))
    def run(text: str, size: int) -> None:
        assert read(tool_format, cut(text, size)) == (text, [], False)

    run()


def test_content_is_held_back_only_where_it_may_be_a_mark() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" <to") == []
    assert parser.push("p") == [Content(" <top")]


def test_arguments_go_out_as_they_come() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push('<tool_call>\n{"name": "now", "arguments": ') == []
    begin, first = parser.push('{"a')
    assert isinstance(begin, CallBegin)
    assert (begin.index, begin.name, begin.call_id[:5], len(begin.call_id)) == (0, "now", "call_", 29)
    assert first == CallArguments(0, '{"a')
    assert parser.push('": "b') == [CallArguments(0, '": "b')]
    assert parser.push('"}}\n</tool_call>') == [CallArguments(0, '"}')]
    assert parser.finish() == []


def test_ids_differ_and_have_the_form_that_templates_take() -> None:
    def ids(tool_format: ToolFormat, text: str) -> list[str]:
        return [p.call_id for p in ToolCallParser(tool_format, NAMES).push(text) if isinstance(p, CallBegin)]

    first, second = ids(HERMES, f"<tool_call>{NOW}</tool_call>" * 2)
    assert first != second
    (short,) = ids(MISTRAL, f"[TOOL_CALLS][{NOW}]")
    assert len(short) == 9
    assert short.isalnum()


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (HERMES, f"Hi <tool_call>{W}</tool_call><tool_call>{NOW}</tool_call> more"),
        (LLAMA3_JSON, f"Hi <|python_tag|>{LW}; {LNOW} more"),
        (MISTRAL, f"Hi [TOOL_CALLS] [{W}, {NOW}] more"),
        (MISTRAL_ARGS, 'Hi [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{} more'),
    ],
    ids=lambda value: value.name if isinstance(value, ToolFormat) else "",
)
def test_an_answer_with_one_call_ends_with_it(tool_format: ToolFormat, text: str) -> None:
    for size in (1, 3, len(text)):
        chunks = cut(text, size)
        assert read(tool_format, chunks, max_calls=1) == ("Hi", [PARIS], False)
