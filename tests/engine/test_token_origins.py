"""How each token came to be, as the engine tells it: aligned with the ids, and in step with what was counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toys import (
    FunctionProposer,
    Transcript,
    cycle_rule,
    greedy_continuation,
    hashed_rule,
    make_engine,
    make_requests,
    never_right_proposer,
    perfect_proposer,
    right_until_proposer,
    run_requests,
    soft_proposer,
    step_once,
)

from dspark.engine.llm import LLM
from dspark.engine.token_origins import token_origins
from dspark.request import OriginKind, SamplingParams, TokenOrigin
from dspark.speculation.proposal import NO_DRAFT, Draft
from dspark.speculation.verification import verify_batch

RULE = hashed_rule(16)
GREEDY = SamplingParams(temperature=0, max_tokens=7)
LETTERS = {OriginKind.ACCEPTED: "a", OriginKind.CORRECTED: "c", OriginKind.BONUS: "b", OriginKind.PLAIN: "p"}


def letters(transcript: Transcript) -> str:
    return "".join(LETTERS[origin.kind] for origin in transcript.token_origins)


def run_one(proposer, sampling=GREEDY, **options) -> Transcript:
    engine = make_engine(RULE, 16, proposer=proposer, **options)
    (transcript,) = run_requests(engine, make_requests([[1, 2, 3]], sampling)).values()
    return transcript


@pytest.mark.parametrize(
    ("proposer", "wanted"),
    [
        (None, "ppppppp"),
        (perfect_proposer(RULE), "paabaab"),
        (never_right_proposer(RULE, 16), "pcccccp"),
        (right_until_proposer(RULE, 16, 1), "pacacab"),
    ],
    ids=["plain", "perfect", "never right", "right once"],
)
def test_the_token_of_the_prefill_is_plain_and_each_round_ends_with_the_targets_own(proposer, wanted):
    """The last token needs no draft, the last but one a draft of one token."""
    assert letters(run_one(proposer, num_draft_tokens=2)) == wanted


def test_an_end_inside_a_block_cuts_origins_where_it_cuts_tokens():
    stop_id = greedy_continuation(RULE, [1, 2, 3], 3)[-1]
    sampling = replace(GREEDY, max_tokens=20, stop_token_ids=(stop_id,))
    transcript = run_one(perfect_proposer(RULE), sampling, num_draft_tokens=5)
    assert (len(transcript.token_ids), letters(transcript)) == (3, "paa")


def test_a_request_without_speculation_has_plain_tokens_beside_one_with_it():
    engine = make_engine(RULE, 16, proposer=perfect_proposer(RULE), num_draft_tokens=2)
    sampling = [GREEDY, replace(GREEDY, num_draft_tokens=0)]
    drafted, plain = run_requests(engine, make_requests([[1], [2]], sampling)).values()
    assert (letters(drafted), letters(plain)) == ("paabaab", "ppppppp")


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_origins_add_up_to_the_counts_of_the_request(verification, monkeypatch):
    monkeypatch.setattr("dspark.engine.sequence.secrets.randbits", lambda num_bits: 7)  # the same draws in every run
    sampling = SamplingParams(temperature=1.0, max_tokens=60)
    transcript = run_one(soft_proposer(RULE, 16), sampling, verification=verification, num_draft_tokens=2)
    stats, text = transcript.last.speculation, letters(transcript)
    num_drafts = sum(stats.accepted_counts)
    assert text.count("a") == stats.num_accepted > 0
    assert text.count("b") + text.count("c") == num_drafts
    assert text.count("b") > 0 < text.count("c")
    assert text.count("p") == 1 + stats.num_rounds - num_drafts


def test_a_draft_that_names_its_proposer_is_that_ones():
    def draft(context):
        tokens = greedy_continuation(RULE, context.token_ids, 2)
        is_first = len(context.token_ids) == 4
        return Draft(token_ids=tokens, proposer_name="first" if is_first else None)

    transcript = run_one(FunctionProposer(draft), num_draft_tokens=2)
    assert [origin.proposer for origin in transcript.token_origins] == [None, *["first"] * 3, *["function"] * 3]


def test_a_step_that_is_run_again_without_its_drafts_gives_plain_tokens(monkeypatch):
    engine = make_engine(cycle_rule(16, 10), 16, proposer=perfect_proposer(cycle_rule(16, 10)), num_draft_tokens=2)
    num_failures = 1

    def failing(logits, rows):
        nonlocal num_failures
        if num_failures and any(row.draft.token_ids for row in rows):
            num_failures -= 1
            raise RuntimeError("scripted")
        return verify_batch(logits, rows)

    monkeypatch.setattr("dspark.engine.engine.verify_batch", failing)
    (request,) = make_requests([[0]], GREEDY)
    engine.add_request(request)
    transcript = Transcript()
    while engine.has_unfinished():
        step_once(engine, {request.request_id: transcript})
    assert (transcript.token_ids, letters(transcript)) == ([1, 2, 3, 4, 5, 6, 7], "ppaabab")


def test_python_gets_origins_beside_the_ids():
    llm = LLM.from_engine(make_engine(RULE, 16, proposer=perfect_proposer(RULE), num_draft_tokens=2))
    (completion,) = llm.generate([[1, 2, 3]], replace(GREEDY, max_tokens=4), show_progress=False)
    accepted = TokenOrigin(kind=OriginKind.ACCEPTED, proposer="function")
    bonus = TokenOrigin(kind=OriginKind.BONUS, proposer="function")
    assert completion.token_origins == [TokenOrigin(kind=OriginKind.PLAIN), accepted, accepted, bonus]


def test_a_round_without_a_draft_is_plain_whoever_drafts():
    assert token_origins(NO_DRAFT, 0, proposer_name="ngram") == [TokenOrigin(kind=OriginKind.PLAIN)]
