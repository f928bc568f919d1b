"""Separating reasoning from content, for every way in which the text may be cut, and counting its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from byte_tokenizers import byte_level_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.serving.reasoning import Reasoning, ReasoningCounter, ReasoningSplitter


def split(chunks: Iterable[str], *, is_open: bool = False) -> tuple[str, str]:
    """Return reasoning and content."""
    splitter = ReasoningSplitter(is_open=is_open)
    parts = [part for chunk in chunks for part in splitter.push(chunk)] + splitter.finish()
    assert all(part.text for part in parts)
    reasoning = [part.text for part in parts if isinstance(part, Reasoning)]
    assert parts[: len(reasoning)] == [Reasoning(text) for text in reasoning]  # all of it comes first
    return "".join(reasoning), "".join(part.text for part in parts[len(reasoning) :])


CASES = [
    ("Hello", ("", "Hello")),
    ("", ("", "")),
    (" \n", ("", " \n")),
    ("<think>\nHm.\n\nYes\n</think>\n\nHello\n", ("Hm.\n\nYes", "Hello\n")),
    ("<think>a</think>b", ("a", "b")),
    (" \n<think>a</think>b", ("a", "b")),
    ("<think>\n\n</think>\n\nHello", ("", "Hello")),
    ("<think></think>", ("", "")),
    ("<think>\na < b </thin> <</think>\n", ("a < b </thin> <", "")),
    ("<think>\nnot done\n</thi", ("not done\n</thi", "")),
    ("<think>\nnot done\n\n", ("not done\n\n", "")),
    ("<think>a</think>b <think>c</think>", ("a", "b <think>c</think>")),
    ("<think>a</think></think>", ("a", "</think>")),
    ("Hi <think>a</think>", ("", "Hi <think>a</think>")),
    ("<thin", ("", "<thin")),
    ("<thinking>", ("", "<thinking>")),
    ("</think>a", ("", "</think>a")),
    ("é <think>世</think>", ("", "é <think>世</think>")),
]
OPEN_CASES = [
    ("\nHm.\n</think>\n\nHello", ("Hm.", "Hello")),
    ("a</think>b", ("a", "b")),
    ("<think>\na</think>b", ("a", "b")),
    ("</think>\n\nHello", ("", "Hello")),
    ("all of it", ("all of it", "")),
    ("<thin", ("<thin", "")),
    ("", ("", "")),
]


@pytest.mark.parametrize(
    ("text", "expected", "is_open"), [(*case, False) for case in CASES] + [(*case, True) for case in OPEN_CASES]
)
def test_reasoning_is_separated_however_the_text_is_cut(text: str, expected: tuple[str, str], is_open: bool) -> None:
    assert split([text], is_open=is_open) == expected
    assert split(text, is_open=is_open) == expected
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert split([text[:first], text[first:second], text[second:]], is_open=is_open) == expected


PIECES = ["<think>", "</think>", "<think", "</", "\n", " ", "a", "é", "<"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=10).map("".join), st.booleans(), st.data())
def test_no_cut_of_any_text_changes_the_split(text: str, is_open: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert split(chunks, is_open=is_open) == split([text], is_open=is_open)


def test_only_what_may_be_the_end_mark_is_held_back() -> None:
    splitter = ReasoningSplitter(is_open=True)
    assert splitter.push("one") == [Reasoning("one")]
    assert splitter.push(" two\n") == [Reasoning(" two")]
    assert splitter.push("</thi") == []
    assert splitter.push("s") == [Reasoning("\n</this")]


@pytest.mark.parametrize(
    ("text", "is_open", "num_tokens"),
    [
        ("<think>ab</think>\n\ncd", False, 17),
        ("<think>ab", False, 9),
        ("ab</think>cd", True, 10),
        ("abcd", True, 4),
        ("abcd", False, 0),
        ("  <thinner", False, 0),
        (" <think></think>x", False, 16),
        ("ab</think>cd</think>", True, 10),
    ],
)
def test_tokens_of_the_reasoning_are_counted_one_by_one(text: str, is_open: bool, num_tokens: int) -> None:
    """D9: however many tokens came at once. Every character is a token here."""
    for size in range(1, 12):
        counter = ReasoningCounter(byte_level_tokenizer(), is_open=is_open)
        token_ids = [*text.encode()]
        for start in range(0, len(token_ids), size):
            counter.push(token_ids[start : start + size])
        assert counter.num_tokens == num_tokens <= len(token_ids)
