"""Incremental detokenising against the tokenizers' own decode of the whole sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from byte_tokenizers import (
    BOS_ID,
    END_OF_TURN_ID,
    SPANNING_ID,
    TOOL_ID,
    ToyTokenizer,
    byte_fallback_backend,
    byte_level_backend,
    byte_level_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from dspark.engine.detokenizer import MAX_HELD_BYTES, create_detokenizer

FAMILY = "👨‍👩‍👧"


def piecewise(tokenizer: ToyTokenizer, token_ids: Sequence[int], *, skip: bool = True) -> list[str]:
    """Return the text settled by each token, and the tail as last entry."""
    detokenizer = create_detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.tail()]


def assert_always_equal_to_decode(tokenizer: ToyTokenizer, token_ids: Sequence[int], *, skip: bool) -> None:
    detokenizer = create_detokenizer(tokenizer, skip_special_tokens=skip)
    settled = ""
    for count, token_id in enumerate(token_ids, 1):
        settled += detokenizer.push(token_id)
        assert settled + detokenizer.tail() == tokenizer.decode(token_ids[:count], skip_special_tokens=skip)


BYTE_LEVEL = byte_level_tokenizer()
FALLBACK_DECODERS = {
    "llama": None,
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "wordpiece": decoders.WordPiece(),
    "bpe": decoders.BPEDecoder("a"),
}


@pytest.mark.parametrize(
    ("tokenizer", "token_ids", "kept", "text"),
    [
        (BYTE_LEVEL, [97, BOS_ID, END_OF_TURN_ID, 98], BOS_ID, "a<bos>b"),
        (ToyTokenizer(byte_fallback_backend()), [260, 257, 256, 263], 257, "hello<s>a"),
    ],
)
def test_special_tokens_that_are_kept_show_their_text(
    tokenizer: ToyTokenizer, token_ids: list[int], kept: int, text: str
) -> None:
    detokenizer = create_detokenizer(tokenizer, skip_special_tokens=True, kept_token_ids=[kept])
    assert "".join(detokenizer.push(token_id) for token_id in token_ids) + detokenizer.tail() == text


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 263), max_size=40), st.booleans())
def test_byte_level_text_is_always_the_decode_of_the_ids(token_ids: list[int], skip: bool) -> None:
    assert_always_equal_to_decode(BYTE_LEVEL, token_ids, skip=skip)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["é 世界", "😀", FAMILY, "\ufffd", "a"]), max_size=6), st.integers(0, 12))
def test_byte_level_text_cut_anywhere_is_the_decode_of_the_ids(pieces: list[str], num_cut: int) -> None:
    token_ids = BYTE_LEVEL.encode("".join(pieces))
    assert_always_equal_to_decode(BYTE_LEVEL, token_ids[: max(0, len(token_ids) - num_cut)], skip=True)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 263), max_size=MAX_HELD_BYTES - 1), st.booleans())
def test_text_of_a_decoder_of_unknown_make_is_always_the_decode_of_the_ids(token_ids: list[int], skip: bool) -> None:
    backend = byte_level_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    assert_always_equal_to_decode(ToyTokenizer(backend), token_ids, skip=skip)


@pytest.mark.parametrize("kind", FALLBACK_DECODERS)
def test_text_of_other_decoders_is_always_the_decode_of_the_ids(kind: str) -> None:
    tokenizer = ToyTokenizer(byte_fallback_backend(FALLBACK_DECODERS[kind]))
    emoji = [*"😀".encode()]

    @settings(max_examples=80, deadline=None)
    @given(
        st.lists(st.one_of(st.integers(256, 266).map(lambda i: [i]), st.just(emoji), st.binary(max_size=3).map(list))),
        st.booleans(),
    )
    def check(pieces: list[list[int]], skip: bool) -> None:
        token_ids = list(itertools.chain.from_iterable(pieces))[: MAX_HELD_BYTES - 1]
        assert_always_equal_to_decode(tokenizer, token_ids, skip=skip)

    check()


def test_half_a_character_is_held_until_it_is_whole() -> None:
    assert piecewise(BYTE_LEVEL, [*"é😀".encode()]) == ["", "é", "", "", "", "😀", ""]


def test_token_that_ends_one_character_and_begins_the_next_settles_the_first() -> None:
    assert piecewise(BYTE_LEVEL, [0xF0, SPANNING_ID, SPANNING_ID, 0x9F]) == ["", "😀", "😀", "", "\ufffd"]


def test_broken_bytes_become_one_replacement_each_and_are_not_held_for_ever() -> None:
    assert piecewise(BYTE_LEVEL, [0xFF, 0xFF, 0xF0, 0x9F, 0x41]) == ["\ufffd", "\ufffd", "", "", "\ufffdA", ""]


def test_special_tokens_are_skipped_only_when_asked_and_added_tokens_never() -> None:
    assert "".join(piecewise(BYTE_LEVEL, [0x41, 258, TOOL_ID])) == "A<tool>"
    assert "".join(piecewise(BYTE_LEVEL, [0x41, 258, TOOL_ID], skip=False)) == "A<end><tool>"


def test_leading_space_is_stripped_once_even_after_a_skipped_special_token() -> None:
    tokenizer = ToyTokenizer(byte_fallback_backend())
    assert piecewise(tokenizer, [257, 259, 257, 259]) == ["", "hello", "", " hello", ""]


def test_byte_run_is_held_until_it_ends() -> None:
    tokenizer = ToyTokenizer(byte_fallback_backend())
    assert piecewise(tokenizer, [*"é".encode(), 261, 0x0A]) == ["", "", "é,", "", "\n"]


def test_byte_run_that_ends_broken_reads_as_the_tokenizer_decodes_it() -> None:
    tokenizer = ToyTokenizer(byte_fallback_backend())
    assert piecewise(tokenizer, [261, *"é".encode(), 0xF0]) == [",", "", "", "", "\ufffd\ufffd\ufffd"]


def test_word_after_a_broken_byte_run_settles_both() -> None:
    tokenizer = ToyTokenizer(byte_fallback_backend())
    assert piecewise(tokenizer, [0xF0, 0x9F, 261]) == ["", "", "\ufffd\ufffd,", ""]


def test_long_byte_run_streams_whole_characters() -> None:
    tokenizer = ToyTokenizer(byte_fallback_backend())
    text = "ကခဂ" * 40  # 360 bytes without a break
    pieces = piecewise(tokenizer, [261, *text.encode()])
    assert "".join(pieces) == "," + text
    assert max(len(piece.encode()) for piece in pieces) <= MAX_HELD_BYTES


def counting_backend(backend: Tokenizer) -> tuple[ToyTokenizer, list[int]]:
    lengths: list[int] = []

    def decode(token_ids: list[int], *, skip_special_tokens: bool) -> str:
        lengths.append(len(token_ids))
        return backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    names = ("decoder", "id_to_token", "get_added_tokens_decoder", "get_vocab_size")
    counted = SimpleNamespace(decode=decode, **{name: getattr(backend, name) for name in names})
    return ToyTokenizer(counted), lengths  # type: ignore[arg-type]


@pytest.mark.parametrize("token_ids", [[0xFF] * 500, [*"ကခဂ".encode()] * 60, [259] * 500])
def test_cost_per_token_does_not_grow_with_the_text(token_ids: list[int]) -> None:
    tokenizer, lengths = counting_backend(byte_fallback_backend())
    piecewise(tokenizer, token_ids)
    assert max(lengths) <= MAX_HELD_BYTES + 1


def test_byte_level_never_decodes_a_window() -> None:
    tokenizer, lengths = counting_backend(byte_level_backend())
    assert piecewise(tokenizer, [*b"plain"]) == ["p", "l", "a", "i", "n", ""]
    assert lengths == []


def test_tokenizer_without_a_decoder_joins_tokens_with_spaces() -> None:
    backend = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    assert piecewise(ToyTokenizer(backend), [0, 1, 0]) == ["one", " two", " one", ""]


def test_id_without_a_token_adds_no_text() -> None:
    assert piecewise(BYTE_LEVEL, [0x41, 9999, 0x42]) == ["A", "", "B", ""]
    assert piecewise(ToyTokenizer(byte_fallback_backend()), [259, 9999, 259]) == ["hello", "", " hello", ""]
