"""Where a request ends and what text leaves when, whatever blocks its tokens come in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from byte_tokenizers import (
    BOS_ID,
    END_OF_TURN_ID,
    EOS_ID,
    ToyTokenizer,
    byte_fallback_backend,
    byte_level_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.engine.output import AppendResult, OutputProcessor
from dspark.request import FinishReason, SamplingParams

TOKENIZER = byte_level_tokenizer()
K1_TEXT = "é 世界 😀👨‍👩‍👧 end"


def processor(
    *,
    tokenizer: ToyTokenizer = TOKENIZER,
    max_output_tokens: int = 1000,
    eos: Sequence[int] = (EOS_ID,),
    **sampling: Any,
) -> OutputProcessor:
    return OutputProcessor(
        tokenizer, SamplingParams(**sampling), eos_token_ids=eos, max_output_tokens=max_output_tokens
    )


def run(output: OutputProcessor, token_ids: Sequence[int], block_len: int) -> Iterator[AppendResult]:
    for start in range(0, len(token_ids), block_len):
        result = output.append(token_ids[start : start + block_len])
        yield result
        if result.finish_reason is not None:
            return


def collect(output: OutputProcessor, token_ids: Sequence[int], block_len: int) -> tuple[list[str], int, AppendResult]:
    """Return the text deltas, the number of kept tokens and the last result."""
    results = list(run(output, token_ids, block_len))
    assert output.num_tokens == sum(result.num_kept for result in results)
    return [result.text for result in results], output.num_tokens, results[-1]


# -- the end of a request ----------------------------------------------------------------------------------


@pytest.mark.parametrize("block_len", range(1, 10))
def test_eos_in_the_middle_of_a_block_ends_the_request_there(block_len: int) -> None:
    deltas, num_kept, last = collect(processor(), [*b"abc", EOS_ID, *b"defghij"], block_len)
    assert ("".join(deltas), num_kept) == ("abc", 4)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)


def test_eos_is_an_ordinary_token_under_ignore_eos() -> None:
    result = processor(ignore_eos=True).append([*b"ab", EOS_ID, *b"cd"])
    assert (result.num_kept, result.text, result.finish_reason) == (5, "abcd", None)


def test_eos_text_is_shown_only_with_include_stop_and_without_skipping() -> None:
    block = [*b"ab", EOS_ID]
    assert processor(include_stop_str_in_output=True, skip_special_tokens=False).append(block).text == "ab<eos>"
    assert processor(include_stop_str_in_output=True).append(block).text == "ab"
    assert processor(skip_special_tokens=False).append(block).text == "ab"


def test_stop_token_ends_the_request_and_is_named() -> None:
    result = processor(stop_token_ids=(ord("c"),)).append([*b"abcd"])
    assert (result.num_kept, result.text, result.stop_reason) == (3, "ab", ord("c"))
    result = processor(stop_token_ids=(ord("c"),), include_stop_str_in_output=True).append([*b"abcd"])
    assert (result.num_kept, result.text, result.stop_reason) == (3, "abc", ord("c"))


def test_stop_token_works_under_ignore_eos() -> None:
    result = processor(stop_token_ids=(EOS_ID,), ignore_eos=True).append([*b"ab", EOS_ID, *b"cd"])
    assert (result.num_kept, result.text, result.stop_reason) == (3, "ab", EOS_ID)


def test_stop_string_at_the_head_of_a_long_block_ends_the_request() -> None:
    """D3."""
    block = [*b"END aaaaaaaa"]
    result = processor(stop=("END",)).append(block)
    assert result == AppendResult(num_kept=3, text="", finish_reason=FinishReason.STOP, stop_reason="END")
    result = processor(stop=("END",), include_stop_str_in_output=True).append(block)
    assert (result.num_kept, result.text) == (3, "END")


def test_stop_string_inside_one_token_is_found_and_cut() -> None:
    tokenizer = ToyTokenizer(byte_fallback_backend())
    hello = 259
    result = processor(tokenizer=tokenizer, stop=("ell",)).append([hello, 263, hello])
    assert (result.num_kept, result.text, result.stop_reason) == (1, "h", "ell")
    result = processor(tokenizer=tokenizer, stop=("ell",), include_stop_str_in_output=True).append([hello, 263])
    assert (result.num_kept, result.text) == (1, "hell")


def test_stop_string_of_byte_tokens_ends_the_request_at_once() -> None:
    tokenizer = ToyTokenizer(byte_fallback_backend())
    result = processor(tokenizer=tokenizer, stop=("\n",)).append([259, 0x0A, 259])
    assert (result.num_kept, result.text, result.stop_reason) == (2, "hello", "\n")


def test_stop_string_that_is_complete_first_wins() -> None:
    result = processor(stop=("abcd", "bc")).append([*b"abcd"])
    assert (result.num_kept, result.text, result.stop_reason) == (3, "a", "bc")


def test_longest_of_the_stop_strings_complete_at_once_wins() -> None:
    result = processor(stop=("c", "abc")).append([*b"abcd"])
    assert (result.num_kept, result.text, result.stop_reason) == (3, "", "abc")


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 15])
@pytest.mark.parametrize("block_len", [1, 4, 5, 8])
def test_exactly_max_tokens_come_out(max_tokens: int, block_len: int) -> None:
    text = "abcdefghijklmnop"
    deltas, num_kept, last = collect(processor(max_output_tokens=max_tokens), [*text.encode()], block_len)
    assert (num_kept, "".join(deltas), last.finish_reason) == (max_tokens, text[:max_tokens], FinishReason.LENGTH)


def test_tokens_left_count_down_to_the_limit() -> None:
    output = processor(max_output_tokens=5)
    assert output.num_tokens_left == 5
    output.append([*b"abc"])
    assert output.num_tokens_left == 2


def test_stop_on_the_last_allowed_token_is_a_stop() -> None:
    assert processor(max_output_tokens=3).append([*b"ab", EOS_ID]).finish_reason == FinishReason.STOP
    assert processor(max_output_tokens=3, stop=("c",)).append([*b"abc"]).finish_reason == FinishReason.STOP


def test_stop_conditions_wait_for_min_tokens() -> None:
    block = [EOS_ID, *b"xx", ord("z"), EOS_ID, *b"xx"]
    result = processor(min_tokens=5, stop=("xx",), stop_token_ids=(ord("z"),)).append(block)
    assert (result.num_kept, result.text, result.stop_reason) == (5, "xxz", None)
    result = processor(min_tokens=6, stop=("xx",), stop_token_ids=(ord("z"),)).append(block)
    assert (result.num_kept, result.text, result.stop_reason) == (7, "xxz", "xx")


def test_stop_string_completed_by_the_last_of_min_tokens_counts() -> None:
    assert processor(min_tokens=3, stop=("abc",)).append([*b"abc"]).num_kept == 3
    assert processor(min_tokens=4, stop=("abc",)).append([*b"abcabc"]).num_kept == 6


def test_stop_string_that_came_too_early_may_overlap_one_that_counts() -> None:
    result = processor(min_tokens=3, stop=("aa",)).append([*b"aaab"])
    assert (result.num_kept, result.text) == (3, "a")


def test_block_after_the_end_is_our_own_mistake() -> None:
    output = processor()
    output.append([EOS_ID])
    with pytest.raises(AssertionError):
        output.append([65])


# -- text that may not leave yet ---------------------------------------------------------------------------


@pytest.mark.parametrize("block_len", range(1, 9))
@pytest.mark.parametrize("is_included", [False, True])
def test_no_part_of_a_stop_string_leaves_early(block_len: int, is_included: bool) -> None:
    """D13."""
    output = processor(stop=("<END>",), include_stop_str_in_output=is_included)
    deltas, num_kept, last = collect(output, [*b"foo<EN", *b"D>bar"], block_len)
    assert "".join(deltas) == ("foo<END>" if is_included else "foo")
    assert not any("<" in delta and "<END>" not in delta for delta in deltas)
    assert (num_kept, last.stop_reason) == (8, "<END>")


def test_false_start_of_a_stop_string_is_released() -> None:
    output = processor(stop=("<END>",))
    assert [output.append([byte]).text for byte in b"a<EN<E"] == ["a", "", "", "", "<EN", ""]
    assert output.append([ord("X")]).text == "<EX"


def test_false_start_is_released_at_the_end() -> None:
    assert processor(stop=("<END>",), max_output_tokens=4).append([*b"a<EN"]).text == "a<EN"
    assert processor(stop=("<END>",)).append([*b"a<EN", EOS_ID]).text == "a<EN"
    output = processor(stop=("<END>",))
    assert output.append([*b"a<EN"]).text == "a"
    assert output.flush() == "<EN"
    assert output.flush() == ""


def test_stop_string_that_overlaps_its_own_beginning_is_found() -> None:
    result = processor(stop=("aab",)).append([*b"aaab"])
    assert (result.num_kept, result.text) == (4, "a")


@pytest.mark.parametrize("block_len", range(1, 10))
def test_characters_split_over_tokens_stay_whole(block_len: int) -> None:
    """K1."""
    token_ids = TOKENIZER.encode(K1_TEXT)
    deltas, _, last = collect(processor(max_output_tokens=len(token_ids)), token_ids, block_len)
    assert "".join(deltas) == K1_TEXT
    assert "\ufffd" not in "".join(deltas)
    assert last.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("block_len", range(1, 10))
def test_end_in_the_middle_of_an_emoji_shows_one_replacement_at_the_very_end(block_len: int) -> None:
    token_ids = TOKENIZER.encode("é 😀")
    deltas, _, _ = collect(processor(max_output_tokens=len(token_ids) - 1), token_ids, block_len)
    assert "".join(deltas) == "é \ufffd"
    assert all("\ufffd" not in delta for delta in deltas[:-1])


def test_half_a_character_before_eos_is_flushed() -> None:
    assert processor().append([ord("a"), 0xF0, 0x9F, EOS_ID]).text == "a\ufffd"


def test_skipped_special_tokens_count_but_show_nothing() -> None:
    block = [ord("a"), BOS_ID, END_OF_TURN_ID, ord("b")]
    assert processor().append(block).num_kept == 4
    assert processor().append(block).text == "ab"
    assert processor(skip_special_tokens=False).append(block).text == "a<bos><end>b"


# -- against the definition --------------------------------------------------------------------------------


def reference(
    tokenizer: ToyTokenizer, token_ids: Sequence[int], sampling: SamplingParams, limit: int
) -> tuple[int, str, FinishReason | None, int | str | None]:
    """Return (kept tokens, text, finish reason, stop reason) by decoding the whole text after every token."""

    def decode(count: int) -> str:
        return tokenizer.decode(token_ids[:count], skip_special_tokens=sampling.skip_special_tokens)

    def stops_in(text: str) -> set[tuple[int, int, str]]:
        text = text.removesuffix("\ufffd")
        return {
            (end, -len(stop), stop)
            for stop in sampling.stop
            for end in range(len(text) + 1)
            if text[:end].endswith(stop)
        }

    too_early = stops_in(decode(max(0, sampling.min_tokens - 1)))
    for count, token_id in enumerate(token_ids, 1):
        if count >= sampling.min_tokens:
            is_eos = token_id == EOS_ID and not sampling.ignore_eos
            if is_eos or token_id in sampling.stop_token_ids:
                text = decode(count if sampling.include_stop_str_in_output else count - 1)
                return count, text, FinishReason.STOP, None if is_eos else token_id
            matches = stops_in(decode(count)) - too_early
            if matches:
                end, minus_len, stop = min(matches)
                cut = end if sampling.include_stop_str_in_output else end + minus_len
                return count, decode(count)[:cut], FinishReason.STOP, stop
        if count == limit:
            return count, decode(count), FinishReason.LENGTH, None
    return len(token_ids), decode(len(token_ids)), None, None


PIECES = st.sampled_from(["a", "b", "ab", "é", "世界", "😀", "👨‍👩‍👧", "\u200d", "\n"])
STOPS = st.lists(PIECES, min_size=1, max_size=3).map("".join)
RAW_IDS = st.one_of(PIECES.map(lambda p: [*p.encode()]), st.lists(st.integers(0, 263), max_size=2))
STREAMS = st.lists(RAW_IDS, min_size=1, max_size=12).map(lambda runs: [i for run in runs for i in run] or [EOS_ID])


@settings(max_examples=300, deadline=None)
@given(
    token_ids=STREAMS,
    stop=st.lists(STOPS, max_size=3),
    stop_token_ids=st.lists(st.sampled_from([ord("b"), BOS_ID]), max_size=1),
    min_tokens=st.integers(0, 8),
    limit=st.integers(8, 40),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_every_chunking_gives_what_the_definition_says(
    token_ids: list[int],
    stop: list[str],
    stop_token_ids: list[int],
    min_tokens: int,
    limit: int,
    flags: tuple[bool, bool, bool],
) -> None:
    sampling = SamplingParams(
        stop=tuple(stop),
        stop_token_ids=tuple(stop_token_ids),
        min_tokens=min_tokens,
        ignore_eos=flags[0],
        include_stop_str_in_output=flags[1],
        skip_special_tokens=flags[2],
    )
    expected = reference(TOKENIZER, token_ids, sampling, limit)
    for block_len in range(1, 10):
        output = OutputProcessor(TOKENIZER, sampling, eos_token_ids={EOS_ID}, max_output_tokens=limit)
        deltas, num_kept, last = collect(output, token_ids, block_len)
        text = "".join(deltas)
        assert expected[1].startswith(text)
        text += output.flush() if last.finish_reason is None else ""
        assert (num_kept, text, last.finish_reason, last.stop_reason) == expected


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(
        st.one_of(st.integers(256, 265).map(lambda i: [i]), PIECES.map(lambda p: [*p.encode()])),
        min_size=1,
        max_size=10,
    ),
    stop=st.lists(st.sampled_from(["\n", "lo", "o,", "😀", "界a", "é"]), max_size=2),
)
def test_every_chunking_agrees_for_byte_fallback_vocabularies(pieces: list[list[int]], stop: list[str]) -> None:
    tokenizer = ToyTokenizer(byte_fallback_backend())
    token_ids = [i for piece in pieces for i in piece][:60]
    sampling = SamplingParams(stop=tuple(stop), ignore_eos=True)
    expected = reference(tokenizer, token_ids, sampling, len(token_ids))
    for block_len in range(1, 10):
        output = OutputProcessor(tokenizer, sampling, eos_token_ids=(), max_output_tokens=len(token_ids))
        deltas, num_kept, last = collect(output, token_ids, block_len)
        assert (num_kept, "".join(deltas), last.finish_reason, last.stop_reason) == expected
