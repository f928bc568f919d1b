"""What may come next in a structure, on the drafted path, at its ends and before its marker."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from structure_cases import compiler_of, matcher_of
from tokenizers import Tokenizer, models

from dspark.errors import RequestError
from dspark.request import SamplingParams
from dspark.speculation.structure_matching import MAX_COMPILED, StructureCompiler, StructureMatcher
from dspark.structure import Structure

WORDS = ["a", "b", "1", "ab", " ", "<tag>", "<end>"]
COMPILER = compiler_of(WORDS)


def words_after(matcher: StructureMatcher, *drafted: str, words: list[str] = WORDS) -> set[str] | None:
    allowed = matcher.allowed([words.index(word) for word in drafted])
    return None if allowed is None else {words[i] for i in np.flatnonzero(allowed)}


def test_a_token_may_come_when_some_text_of_the_structure_goes_on_with_it():
    matcher = matcher_of(WORDS, Structure.regex("(ab|b)1?"))
    assert words_after(matcher) == {"a", "b", "ab"}
    assert words_after(matcher, "a") == {"b"}
    assert words_after(matcher, "a", "b") == words_after(matcher, "ab") == {"1", "<end>"}


def test_text_that_is_forced_is_spelled_as_the_tokenizer_does():
    assert words_after(matcher_of(WORDS, Structure.regex("ab1"))) == {"ab"}
    assert words_after(matcher_of(WORDS, Structure.regex("a(b|1)"))) == {"a", "ab"}


def test_nothing_follows_a_complete_structure_a_forbidden_token_or_the_end():
    matcher = matcher_of(WORDS, Structure.regex("(ab|b)1?"))
    for drafted in (["ab", "1"], ["1"], ["a", "a"], ["ab", "<end>"], ["a", "a", "b"]):
        assert words_after(matcher, *drafted) is None
    assert [matcher.is_complete([WORDS.index(w) for w in path]) for path in (["ab", "1"], ["1"], ["ab"])] == [
        True, False, False,
    ]  # fmt: skip


def test_drafts_are_counted_up_to_the_first_forbidden_token_or_the_completing_one():
    matcher = matcher_of(WORDS, Structure.regex("(ab|b)1?"))
    counts = {(0, 1, 2, 2): 3, (3, 2, 6): 2, (0, 0): 1, (2, 0): 0, (3, 6, 0): 2, (): 0}
    assert {path: matcher.num_allowed(path) for path in counts} == counts


def test_drafted_tokens_leave_no_trace_and_committed_ones_do():
    """G2"""
    matcher = matcher_of(WORDS, Structure.regex("(ab)*1"))
    for drafted in ([0, 1, 0], [2], [3, 3, 1], [0, 0]):
        matcher.num_allowed(drafted)
        matcher.allowed(drafted)
        assert words_after(matcher) == {"a", "ab", "1"}
    matcher.follow([3, 0])
    assert words_after(matcher) == {"b"}
    matcher.follow([])
    matcher.follow([1, 2])
    assert words_after(matcher) is None
    assert matcher.is_complete()


def test_every_row_is_masked_by_the_tokens_before_it():
    """G1: the bonus row too; rows from which nothing comes out are left as they are."""
    matcher = matcher_of(WORDS, Structure.regex("(ab|b)1?"))
    logits = torch.arange(28, dtype=torch.float32).view(4, 7)
    before = logits.clone()
    matcher.mask_(logits, [0, 1, 2])
    assert [torch.isfinite(row).nonzero().flatten().tolist() for row in logits] == [[0, 1, 3], [1], [2, 6], [*range(7)]]
    assert torch.equal(logits[torch.isfinite(logits)], before[torch.isfinite(logits)])
    last = before[:1].clone()
    matcher.mask_(last, [0])  # one row: behind all that is drafted
    assert torch.isfinite(last[0]).nonzero().flatten().tolist() == [1]


def test_the_end_may_come_where_the_structure_allows_it_and_the_request_does_not_ignore_it():
    structure = Structure.regex("a*b?")
    assert words_after(matcher_of(WORDS, structure)) == {"a", "b", "ab", "<end>"}
    assert words_after(matcher_of(WORDS, structure, ignore_eos=True)) == {"a", "b", "ab"}
    no_end = WORDS[:5]  # a model without end-of-sequence tokens
    matcher = matcher_of(no_end, structure)
    assert words_after(matcher, words=no_end) == {"a", "b", "ab"}
    assert matcher.is_complete([1])


def test_ids_without_a_token_never_come():
    compiler = compiler_of(WORDS, vocab_size=16)
    matcher = compiler.matcher_for(SamplingParams(structure=Structure.regex("(.|\n)*")))
    assert np.flatnonzero(matcher.allowed()).tolist() == [0, 1, 2, 3, 4, 6, 7]  # 7 is the tokenizer's unknown word


def test_a_structure_of_several_end_tokens_may_end_with_any():
    words = ["a", "<end>", "<stop>"]
    compiler = StructureCompiler(compiler_of(words)._tokenizer, vocab_size=3, eos_token_ids=[1, 2])
    matcher = compiler.matcher_for(SamplingParams(structure=Structure.regex("a*")))
    assert np.flatnonzero(matcher.allowed()).tolist() == [0, 1, 2]


# -- what comes before ---------------------------------------------------------------------------------------------


def test_anything_but_the_end_may_come_before_the_marker():
    """G3"""
    matcher = matcher_of(WORDS, Structure.regex("1+", after="<tag>"))
    everything = set(WORDS) - {"<end>"}
    assert words_after(matcher) == words_after(matcher, "1", "b", "ab") == everything
    assert words_after(matcher, "1", "<tag>") == {"1"}
    assert words_after(matcher, "<tag>", "1") == {"1", "<end>"}
    assert words_after(matcher, "<tag>", "a") is None
    matcher.follow([0, 5])
    assert words_after(matcher) == {"1"}


@pytest.mark.parametrize("text", ["</t>", "xx</t>", "<</t>", "</</t>", "</t</t>", "</</</t>"])
def test_a_marker_of_several_tokens_is_found_wherever_it_stands(text):
    words = [*"</t>x1", "<end>"]
    matcher = matcher_of(words, Structure.regex("1", after="</t>"))
    drafted = [words.index(character) for character in text]
    assert all(words_after(matcher, *text[:n], words=words) == set(words) - {"<end>"} for n in range(len(text)))
    assert words_after(matcher, *text, words=words) == {"1"}
    matcher.follow(drafted[:2])
    matcher.follow(drafted[2:])
    assert words_after(matcher, words=words) == {"1"}


def test_a_token_may_end_the_marker_and_begin_the_structure_but_nothing_else():
    words = ["x", "</t", ">", ">1", ">\n", ">x", ">\n1", "1</t>1", "1", "2", "<end>"]
    matcher = matcher_of(words, Structure.regex("12", after="</t>"))
    everything = set(words) - {"<end>"}
    assert words_after(matcher, "x", words=words) == everything
    assert words_after(matcher, "</t", words=words) == everything - {">x"}
    for drafted in (["</t", ">1"], ["</t", ">\n", "1"], ["</t", ">\n1"], ["1</t>1"], ["</t", ">", "1"]):
        assert words_after(matcher, *drafted, words=words) == {"2"}, drafted


# -- compiling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (Structure.regex("a(("), "unclosed group"),
        (Structure.json_schema({"type": "strin"}), "strin"),
        (Structure.json_schema({"unevaluatedProperties": False}), "unevaluatedProperties"),
        (Structure.json_schema({"$ref": "http://example.com/x"}), "example.com"),
        (Structure.grammar("start: nothing"), "nothing"),
        (Structure.grammar("root ::= nothing"), "nothing"),
        (Structure.regex("c+"), "no text"),
        (Structure.regex(""), "no text"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_librarys_words(structure, words):
    with pytest.raises(RequestError, match=words) as caught:
        compiler_of(WORDS).check(structure)
    assert caught.value.param == "structure"
    assert str(caught.value).startswith("structure ")


def test_a_structure_past_the_limits_is_refused_with_the_librarys_words(monkeypatch):
    limits = LLParserLimits(step_lexer_fuel=1, verbose_errors=False)
    monkeypatch.setattr("dspark.speculation.structure_matching.LIMITS", limits)
    with pytest.raises(RequestError, match=r"no token that could come out: .*too many expressions"):
        compiler_of(WORDS).check(Structure.regex("(a|b)*1"))


def test_a_tokenizer_that_the_library_does_not_know_is_refused():
    class Words:
        backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))

    with pytest.raises(RequestError, match="tokenizer") as caught:
        StructureCompiler(Words(), vocab_size=2, eos_token_ids=[]).check(Structure.regex("a"))
    assert caught.value.param == "structure"


def test_compiled_structures_are_kept_up_to_a_limit():
    compiler = compiler_of(WORDS)
    for count in range(1, MAX_COMPILED + 3):
        compiler.check(Structure.regex(f"a{{{count}}}"))
    assert len(compiler._compiled) == MAX_COMPILED
    compiler.check(Structure.regex("a{1}"))  # compiled again


def test_matchers_of_one_structure_are_independent_also_between_threads():
    compiler = compiler_of(WORDS)
    sampling = SamplingParams(structure=Structure.regex("(a|b){400}1"))
    failures: list[str] = []

    def walk() -> None:
        try:
            matcher = compiler.matcher_for(sampling)
            for i in range(100):
                assert words_after(matcher) == {"a", "b", "ab"}
                matcher.num_allowed([0, 1, 3, 2])
                matcher.follow([i % 2])
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=walk) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_matcher_may_be_asked_from_another_thread_while_the_text_goes_on():
    """A drafter's call that was left behind goes on drawing for a request that has gone on."""
    matcher = matcher_of(WORDS, Structure.regex("(a|b)*"))
    done, failures = threading.Event(), []

    def ask() -> None:
        try:
            while not done.is_set():
                assert matcher.allowed([0, 1, 0, 3]) is not None
        except BaseException as error:
            failures.append(repr(error))

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(300):
        matcher.follow([0, 1])
    done.set()
    thread.join()
    assert failures == []


SYMBOLS = st.text(alphabet='ab1|"(){}[]*+?.^$\\ \n:=/<>-,', max_size=30)
SCHEMAS = st.dictionaries(
    st.sampled_from(["type", "pattern", "enum", "anyOf", "items", "maxLength", "minItems", "$ref", "const", "format"]),
    st.one_of(st.none(), st.integers(-3, 9), SYMBOLS, st.sampled_from(["string", "array", "#"]), st.lists(SYMBOLS)),
    max_size=4,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.one_of(
        SYMBOLS.map(Structure.regex),
        SYMBOLS.map(lambda text: Structure.grammar(f"start: {text}")),
        SYMBOLS.map(lambda text: Structure.grammar(f"root ::= {text}")),
        SCHEMAS.map(Structure.json_schema),
    )
)
def test_any_structure_is_refused_or_has_a_first_token(structure):
    try:
        COMPILER.check(structure)
    except RequestError as error:
        assert error.param == "structure"
    else:
        allowed = COMPILER.matcher_for(SamplingParams(structure=structure)).allowed()
        assert allowed is not None
        assert allowed.any()
