"""Requests whose text must have a structure: with speculation on they get the text of plain decoding, in one batch."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
from dspark_bench import VOCAB as TINY_VOCAB
from dspark_bench import RecordingProposer, engine_over, stored_drafter
from structure_cases import SpellingTokenizer, engine_over_words, matcher_of
from toys import (
    FunctionProposer,
    Transcript,
    hashed_rule,
    make_requests,
    perfect_proposer,
    random_prompts,
    random_proposer,
    run_requests,
    soft_proposer,
    step_once,
)

from dspark.engine.engine import Engine
from dspark.errors import RequestError
from dspark.request import FinishReason, SamplingParams
from dspark.speculation.ngram import NgramProposer
from dspark.structure import Structure

WORDS = ["a", "b", "c", "1", "2", "{", "}", '"', ":", ",", '"a"', "12", " ", '{"a":', "<end>", "</think>"]
VOCAB = len(WORDS)
RULE = hashed_rule(VOCAB)
INTEGER_A = {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
PROPOSERS = {
    "perfect for the unconstrained target": lambda: perfect_proposer(RULE),
    "random": lambda: random_proposer(VOCAB),
    "ngram": NgramProposer,
    "soft": lambda: soft_proposer(RULE, VOCAB),
}
REQUESTS = {
    "free": {},
    "schema": {"structure": Structure.json_schema(INTEGER_A)},
    "regex": {"structure": Structure.regex("[12]{4}(a|bc)*")},
    "choice": {"structure": Structure.choice(["abcab1", "1212", "bc{"])},
    "grammar": {"structure": Structure.grammar('start: "a" start "b" | "1"')},
    "penalised": {"structure": Structure.regex("[abc12]{12}"), "presence_penalty": 1.5, "logit_bias": {0: 2.0}},
    "endless": {"structure": Structure.regex("[ab]*c?"), "ignore_eos": True},
    "late": {"structure": Structure.regex("[ab12]+"), "min_tokens": 7},
    "stopped": {"structure": Structure.regex("[abc]{9}"), "stop": ["ca", "ba"]},
    "reported": {"structure": Structure.regex("[abc12]+"), "logprobs": 2},
    "reasoned": {"structure": Structure.json_schema(INTEGER_A, after="</think>")},
    "marked by text": {"structure": Structure.regex("[ab]+1", after="a1")},
}


def everything() -> list[SamplingParams]:
    """Every request, greedy and seeded."""
    return [
        SamplingParams(temperature=temperature, seed=70 + i, max_tokens=20, **fields)
        for i, (fields, temperature) in enumerate(itertools.product(REQUESTS.values(), (0.0, 1.0)))
    ]


@pytest.fixture(scope="module")
def plain() -> dict[str, Transcript]:
    """Each request alone, without drafts."""
    params = everything()
    requests = make_requests(random_prompts(len(params), VOCAB), params)
    return {r.request_id: run_requests(engine_over_words(WORDS, RULE), [r])[r.request_id] for r in requests}


def assert_matchers_stand_where_the_text_does(engine: Engine) -> None:
    """G2: of every request that runs, compared with a matcher that saw nothing but the committed tokens."""
    for sequence in engine._sequences.values():
        sampling = sequence.request.sampling
        if sampling.structure is None:
            continue
        fresh = engine.structures.matcher_for(sampling)
        fresh.follow(sequence.token_ids[sequence.num_prompt_tokens :])
        np.testing.assert_array_equal(sequence.logit_processor.structure.allowed(), fresh.allowed())


@pytest.mark.parametrize("length", [1, 4, 7])
@pytest.mark.parametrize("proposer", PROPOSERS.values(), ids=PROPOSERS.keys())
def test_structured_and_free_requests_get_the_text_of_plain_decoding_also_through_preemption(proposer, length, plain):
    """G2: in a pool too small for all of them; after every step each matcher has consumed the committed tokens."""
    params = everything()
    requests = make_requests(random_prompts(len(params), VOCAB), params)
    engine = engine_over_words(
        WORDS, RULE, proposer=proposer(), num_draft_tokens=length, num_pages=40, max_model_len=80
    )
    transcripts = {request.request_id: Transcript() for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        step_once(engine, transcripts)
        assert_matchers_stand_where_the_text_does(engine)
    for request_id, transcript in transcripts.items():
        assert transcript.token_ids == plain[request_id].token_ids, request_id
        assert transcript.text == plain[request_id].text
        assert transcript.finish_reason == plain[request_id].finish_reason
        assert [e.token_id for e in transcript.logprobs] == [e.token_id for e in plain[request_id].logprobs]
    assert engine.metrics.registry.get_sample_value("vllm:num_preemptions_total", {"model_name": "toy"}) > 0


def test_the_structures_show(plain):
    """Else the equality above says nothing."""
    texts = {name: (plain[f"r{2 * i}"], plain[f"r{2 * i + 1}"]) for i, name in enumerate(REQUESTS)}
    patterns = {
        "schema": r'\{\s*"a"\s*:\s*[12]+\s*\}', "regex": "[12]{4}(a|bc)*", "choice": "abcab1|1212|bc{",
        "penalised": "[abc12]{12}", "late": "[ab12]+", "reported": "[abc12]+",
    }  # fmt: skip
    for name, pattern in patterns.items():
        for transcript in texts[name]:
            if transcript.finish_reason is FinishReason.STOP:
                assert re.fullmatch(pattern, transcript.text), (name, transcript.text)
    assert {t.finish_reason for t in texts["choice"]} == {FinishReason.STOP}
    assert not re.fullmatch("[abc12]*", texts["free"][1].text)


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_unseeded_greedy_requests_do_not_depend_on_the_verifier(verification):
    params = [SamplingParams(temperature=0, max_tokens=16, **fields) for fields in REQUESTS.values()]
    requests = make_requests(random_prompts(len(params), VOCAB, seed=4), params)
    expected = {
        r.request_id: run_requests(engine_over_words(WORDS, RULE), [r])[r.request_id].token_ids for r in requests
    }
    proposer = soft_proposer(RULE, VOCAB)
    engine = engine_over_words(WORDS, RULE, proposer=proposer, verification=verification, num_pages=256)
    found = run_requests(engine, requests)
    assert {request_id: transcript.token_ids for request_id, transcript in found.items()} == expected


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("fields", [REQUESTS["schema"], REQUESTS["regex"], REQUESTS["reasoned"]])
def test_unseeded_texts_have_the_structure_too(fields, verification):
    """G1, with a proposer that knows nothing of it."""
    proposer = soft_proposer(RULE, VOCAB)
    engine = engine_over_words(WORDS, RULE, proposer=proposer, verification=verification, num_pages=256)
    params = SamplingParams(temperature=1.3, max_tokens=24, **fields)
    for transcript in run_requests(engine, make_requests(random_prompts(12, VOCAB), params)).values():
        assert transcript.last.error is None
        matcher = matcher_of(WORDS, fields["structure"])
        assert matcher.num_allowed(transcript.token_ids) == len(transcript.token_ids)


@pytest.mark.parametrize("drafter", ["deepspec_gated", "speculators_fill_in"])
def test_a_dspark_drafter_changes_nothing_either(drafter):
    """It draws from logits with the same masks, one of them with a pruned vocabulary."""
    words = [*"abcdefghijklmnopqrstuvwxyz0123456789{}:,", '"', *(f"{a}{b}" for a in "abcd" for b in "efghijklmnopqrst")]
    words += [*(f"<pad{i}>" for i in range(TINY_VOCAB - len(words) - 1)), "<end>"]
    structures = [
        Structure.regex("[a-z]{3}[0-9]{4}"), Structure.json_schema({"type": "string", "maxLength": 9}),
        Structure.regex("[0-9]+", after="a"), None,
    ]  # fmt: skip
    params = [
        SamplingParams(temperature=temperature, seed=7, max_tokens=12, structure=structure)
        for structure, temperature in itertools.product(structures, (0.0, 1.0))
    ]
    requests = make_requests(random_prompts(len(params), TINY_VOCAB, low=3, high=20, seed=3), params)
    tokenizer = SpellingTokenizer(words)
    expected = {
        r.request_id: run_requests(engine_over(None, tokenizer=tokenizer), [r])[r.request_id].token_ids
        for r in requests
    }
    proposer = RecordingProposer(stored_drafter(drafter))
    found = run_requests(engine_over(proposer, num_pages=128, tokenizer=tokenizer), requests)
    assert {request_id: transcript.token_ids for request_id, transcript in found.items()} == expected
    prompt_lens = {request.request_id: len(request.prompt_token_ids) for request in requests}
    drafted = [r for r in proposer.recorded if r.context.sampling.structure is structures[0] and r.draft.token_ids]
    assert drafted
    if drafter == "deepspec_gated":  # which has every token that the structure may want
        for recorded in drafted:
            matcher = matcher_of(words, structures[0])
            matcher.follow(recorded.token_ids[prompt_lens[recorded.context.request_id] :])
            num_allowed = matcher.num_allowed(recorded.draft.token_ids)
            is_complete = matcher.is_complete(recorded.draft.token_ids[:num_allowed])
            assert is_complete or num_allowed == len(recorded.draft.token_ids)


# -- cases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_four_digits_come_out_of_a_target_that_prefers_letters(length, temperature, verification):
    """G1: the drafter proposes a letter at slot 1; every row is masked, also the bonus."""
    letters = 6

    def rule(context):
        return np.array([9.0] * letters + [0.1 * len(context) * i for i in range(10)], dtype=np.float32)

    proposer = FunctionProposer(lambda c: [6, 0, 7, 8, 9, 10, 11][: c.num_draft_tokens])
    words = [*"abcdef", *"0123456789"]
    engine = engine_over_words(words, rule, proposer=proposer, num_draft_tokens=length, verification=verification)
    params = SamplingParams(temperature=temperature, max_tokens=20, structure=Structure.regex("[0-9]{4}"))
    for transcript in run_requests(engine, make_requests([[0], [1, 7], [2]], params)).values():
        assert re.fullmatch("[0-9]{4}", transcript.text)
        assert transcript.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("num_right", range(6))
def test_valid_json_comes_out_whatever_is_accepted(num_right):
    """G2: the first 0 to 5 drafted tokens are right, the next one is wrong but allowed."""
    words = ["{", '"a"', ":", "1", "2", "3", "}", "x"]
    rule = hashed_rule(len(words))
    structure = Structure.json_schema({**INTEGER_A, "x-guidance": {"whitespace_flexible": False}})
    params = SamplingParams(temperature=0, max_tokens=30, structure=structure)
    expected = run_requests(engine_over_words(words, rule), make_requests([[7, 3]], params))["r0"]

    def draft(context):
        num_done = len(context.token_ids) - 2
        right = expected.token_ids[num_done : num_done + num_right]
        digits = [i for i in (3, 4, 5) if i != (expected.token_ids + [6] * 9)[num_done + num_right]]
        return [*right, digits[0], 3, 3][: context.num_draft_tokens]

    engine = engine_over_words(words, rule, proposer=FunctionProposer(draft), num_draft_tokens=7)
    transcripts = {"r0": Transcript()}
    engine.add_request(make_requests([[7, 3]], params)[0])
    while engine.has_unfinished():
        step_once(engine, transcripts)
        assert_matchers_stand_where_the_text_does(engine)
    assert transcripts["r0"].token_ids == expected.token_ids
    assert isinstance(json.loads(expected.text)["a"], int)


@pytest.mark.parametrize("marker", [["</think>"], ["</", "thi", "nk>"]])
@pytest.mark.parametrize("slot", range(1, 8))
def test_the_structure_holds_from_the_token_behind_its_marker(slot, marker):
    """G3: the marker's last token stands at each slot of a draft of 7, and a token the structure forbids behind it."""
    words = ["t", "{", '"a"', ":", "1", "}", "</think>", "</", "thi", "nk>", "<end>"]
    begin = ["t"] * max(0, slot + 1 - len(marker))  # the first token of an answer comes without a draft
    answer = SpellingTokenizer(words).ids(*begin, *marker, *"ttttttt")

    def rule(context):
        row = np.array([1.0, 0.5, 0.5, 0.5, 0.6, 0.7, 0.1, 0.0, 0.0, 0.0, 0.2], dtype=np.float32)
        num_done = len(context) - 2
        if num_done < len(begin) + len(marker):
            row[answer[num_done]] = 9.0
        return row

    proposer = FunctionProposer(lambda c: answer[len(c.token_ids) - 2 :][: c.num_draft_tokens])
    structure = Structure.json_schema({**INTEGER_A, "x-guidance": {"whitespace_flexible": False}}, after="</think>")
    params = SamplingParams(temperature=0, max_tokens=30, structure=structure, skip_special_tokens=False)
    for engine in (
        engine_over_words(words, rule),
        engine_over_words(words, rule, proposer=proposer, num_draft_tokens=7),
    ):
        transcript = run_requests(engine, make_requests([[0, 0]], params))["r0"]
        thought, _, rest = transcript.text.partition("</think>")
        assert thought == "t" * len(begin)
        assert rest == '{"a":1}'
        assert transcript.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("length", [0, 4])
@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"structure": Structure.regex("a+")}, "aaaaaaaaaaaa", FinishReason.LENGTH),
        ({"structure": Structure.regex("a+"), "max_tokens": 3}, "aaa", FinishReason.LENGTH),
        ({"structure": Structure.regex("a{3}"), "max_tokens": 3}, "aaa", FinishReason.STOP),
        ({"structure": Structure.regex("a{3}")}, "aaa", FinishReason.STOP),
        ({"structure": Structure.regex("a{3}"), "ignore_eos": True}, "aaa", FinishReason.STOP),
        ({"structure": Structure.regex("a{3}"), "min_tokens": 9}, "aaa", FinishReason.STOP),
        ({"structure": Structure.regex("a{3}"), "stop": ["aa"]}, "", FinishReason.STOP),
        ({"structure": Structure.regex("a{3}"), "bad_token_ids": [2]}, "aaa", FinishReason.STOP),
        ({"structure": Structure.regex("b*"), "logit_bias": {2: 9.0}}, "", FinishReason.STOP),
        ({"structure": Structure.regex("b*"), "logit_bias": {2: 9.0}, "min_tokens": 4}, "bbbb", FinishReason.STOP),
        ({"structure": Structure.regex("(ab)*"), "logit_bias": {2: 9.0}, "min_tokens": 2}, "ab", FinishReason.STOP),
    ],
)
def test_an_answer_ends_where_its_structure_does_or_where_the_end_may_come(fields, text, reason, length):
    """Also where the end is banned, ignored or not due yet; and never in the middle of a structure."""
    words = ["a", "b", "<end>"]

    def rule(context):
        return np.array([1.0, 0.5, 0.0], dtype=np.float32)

    params = SamplingParams(**{"temperature": 0, "max_tokens": 12} | fields)
    engine = engine_over_words(
        words, rule, proposer=random_proposer(3) if length else None, num_draft_tokens=length or 5
    )
    transcript = run_requests(engine, make_requests([[0, 1]], params))["r0"]
    assert (transcript.text, transcript.finish_reason) == (text, reason)


def test_forbidden_drafts_cost_no_row():
    """The draft [1, 2, a, 1] for digits is verified in three rows, one whose first token is forbidden in none."""
    words = [*"ab", *"12"]
    rule = hashed_rule(4)
    first = iter([[2, 3, 0, 2], [1, 2, 2, 2]])
    proposer = FunctionProposer(lambda c: next(first, []))
    engine = engine_over_words(words, rule, proposer=proposer, num_draft_tokens=4)
    params = SamplingParams(temperature=0, max_tokens=12, structure=Structure.regex("[12]{12}"))
    run_requests(engine, make_requests([[0]], params))
    assert [len(rows[0].token_ids) for rows in engine.runner.rows_per_pass][:4] == [1, 3, 1, 1]


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_dead_end_is_an_error_that_names_the_structure_and_keeps_the_text_before_it(length, verification):
    """After "ab" only c may come, which is banned: others in the batch go on."""
    words = ["a", "b", "c", "<end>"]
    rule = hashed_rule(4)
    proposer = FunctionProposer(lambda c: [0, 1, 2, 2][-(c.num_draft_tokens) :]) if length else None
    engine = engine_over_words(words, rule, proposer=proposer, num_draft_tokens=length or 5, verification=verification)
    params = [
        SamplingParams(temperature=1, max_tokens=9, structure=Structure.regex("abc"), bad_token_ids=[2]),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    ]
    transcripts = run_requests(engine, make_requests([[3], [3]], params))
    dead = transcripts["r0"]
    assert (dead.text, dead.finish_reason, dead.last.error_param) == ("ab", FinishReason.ERROR, "structure")
    assert "no token" in dead.last.error
    assert len(transcripts["r1"].token_ids) == 9


@pytest.mark.parametrize(
    "structure",
    [
        Structure.regex("a(("),
        Structure.grammar("start: nothing"),
        Structure.json_schema({"type": "strin"}),
        Structure.json_schema({"unevaluatedProperties": False}),
        Structure.regex("z+"),
        Structure.regex(""),
    ],
)
def test_what_cannot_be_compiled_or_written_is_refused(structure):
    engine = engine_over_words(WORDS, RULE)
    with pytest.raises(RequestError) as caught:
        engine.add_request(make_requests([[1]], SamplingParams(structure=structure))[0])
    assert caught.value.param == "structure"
    assert not engine.has_unfinished()
