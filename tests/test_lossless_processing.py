"""Requests that change the target's logits: with speculation on they get the text of plain decoding, in one batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from dspark_bench import VOCAB as TINY_VOCAB
from dspark_bench import RecordingProposer, engine_over, stored_drafter
from toys import (
    FunctionProposer,
    Transcript,
    hashed_rule,
    make_engine,
    make_requests,
    perfect_proposer,
    random_prompts,
    random_proposer,
    run_requests,
    soft_proposer,
    table_rule,
)

from dspark.errors import RequestError
from dspark.request import SamplingParams
from dspark.speculation.ngram import NgramProposer

VOCAB = 16
RULE = hashed_rule(VOCAB)
PROPOSERS = {
    "perfect for the unchanged target": lambda: perfect_proposer(RULE),
    "random": lambda: random_proposer(VOCAB),
    "ngram": NgramProposer,
    "soft": lambda: soft_proposer(RULE, VOCAB),
}
CHANGES = {
    "none": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "repetition": {"repetition_penalty": 1.8},
    "encouraged": {"presence_penalty": -2.0, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
    "biased": {"logit_bias": {3: 4.0, 5: -100, 7: -3.5}},
    "banned": {"bad_token_ids": [0, 1, 2, 3]},
    "sequences": {"bad_token_sequences": [(i, j) for i in range(16) for j in range(8)]},
    "allowed": {"allowed_token_ids": [2, 4, 6, 8, 10]},
    "late": {"min_tokens": 6, "stop_token_ids": [1, 2, 3], "presence_penalty": 0.7},
    "reported": {"logprobs": 3, "frequency_penalty": 0.4},
}


def everything(*, max_tokens: int) -> list[SamplingParams]:
    """Every change, greedy and seeded."""
    return [
        SamplingParams(temperature=temperature, seed=40 + i, max_tokens=max_tokens, **change)
        for i, (change, temperature) in enumerate(itertools.product(CHANGES.values(), (0.0, 1.0)))
    ]


def assert_logprobs_close(found: Transcript, expected: Transcript) -> None:
    """F1, F2"""
    assert len(found.logprobs) == len(expected.logprobs)
    assert [e.token_id for e in found.logprobs] == [e.token_id for e in expected.logprobs]
    np.testing.assert_allclose(
        [e.logprob for e in found.logprobs], [e.logprob for e in expected.logprobs], rtol=0, atol=1e-4
    )
    assert [[i for i, _ in e.top] for e in found.logprobs] == [[i for i, _ in e.top] for e in expected.logprobs]


@pytest.fixture(scope="module")
def plain() -> dict[str, Transcript]:
    """Each request alone, without drafts."""
    params = everything(max_tokens=24)
    requests = make_requests(random_prompts(len(params), VOCAB), params)
    return {r.request_id: run_requests(make_engine(RULE, VOCAB), [r])[r.request_id] for r in requests}


@pytest.mark.parametrize("length", [1, 4, 7])
@pytest.mark.parametrize("proposer", PROPOSERS.values(), ids=PROPOSERS.keys())
def test_mixed_requests_get_the_text_of_plain_decoding_also_through_preemption(proposer, length, plain):
    """E1, E3, E4, F1: every change, greedy and seeded, in a pool too small for all of them."""
    params = everything(max_tokens=24)
    requests = make_requests(random_prompts(len(params), VOCAB), params)
    engine = make_engine(RULE, VOCAB, proposer=proposer(), num_draft_tokens=length, num_pages=40, max_model_len=80)
    transcripts = run_requests(engine, requests)
    for request_id, transcript in transcripts.items():
        assert transcript.token_ids == plain[request_id].token_ids, request_id
        assert transcript.finish_reason == plain[request_id].finish_reason
        assert_logprobs_close(transcript, plain[request_id])
    assert engine.metrics.registry.get_sample_value("vllm:num_preemptions_total", {"model_name": "toy"}) > 0


def test_the_changes_show(plain):
    """Else the equality above says nothing."""
    greedy = [plain[f"r{2 * i}"].token_ids for i in range(len(CHANGES))]
    by_name = dict(zip(CHANGES, greedy, strict=True))
    assert set(by_name["allowed"]) <= {2, 4, 6, 8, 10}
    assert set(by_name["banned"]).isdisjoint({0, 1, 2, 3})
    assert 5 not in by_name["biased"]
    assert set(by_name["sequences"][1:]) <= set(range(8, 16))
    assert len(by_name["late"]) >= 6
    assert len(set(by_name["frequency"])) > len(set(by_name["encouraged"]))


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_unseeded_greedy_requests_do_not_depend_on_the_verifier(verification):
    params = [SamplingParams(temperature=0, max_tokens=16, **change) for change in CHANGES.values()]
    requests = make_requests(random_prompts(len(params), VOCAB, seed=4), params)
    expected = {r.request_id: run_requests(make_engine(RULE, VOCAB), [r])[r.request_id].token_ids for r in requests}
    engine = make_engine(RULE, VOCAB, proposer=soft_proposer(RULE, VOCAB), verification=verification, num_pages=256)
    found = run_requests(engine, requests)
    assert {request_id: transcript.token_ids for request_id, transcript in found.items()} == expected


@pytest.mark.parametrize("drafter", ["deepspec_gated", "speculators_fill_in"])
def test_a_dspark_drafter_changes_nothing_either(drafter):
    """With the drafter's own logits changed too, and a pruned vocabulary in one of them."""
    changes = [
        {"presence_penalty": 1.5}, {"repetition_penalty": 1.8}, {"logit_bias": {3: 50.0, 5: -100}},
        {"allowed_token_ids": list(range(20, 30))}, {},
    ]  # fmt: skip
    params = [
        SamplingParams(temperature=temperature, seed=7, max_tokens=12, **change)
        for change, temperature in itertools.product(changes, (0.0, 1.0))
    ]
    requests = make_requests(random_prompts(len(params), TINY_VOCAB, low=3, high=20, seed=3), params)
    expected = {r.request_id: run_requests(engine_over(None), [r])[r.request_id].token_ids for r in requests}
    proposer = RecordingProposer(stored_drafter(drafter))
    found = run_requests(engine_over(proposer, num_pages=128), requests)
    assert {request_id: transcript.token_ids for request_id, transcript in found.items()} == expected
    assert any(recorded.draft.token_ids for recorded in proposer.recorded)


# -- cases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_penalty_ends_a_loop(length):
    """E1: constant logits 2.0 and 1.9, presence penalty 0.5: A B A A A A."""
    rule = table_rule(np.exp([2.0, 1.9, -9.0]))
    for proposer in (FunctionProposer(lambda c: [0] * c.num_draft_tokens), soft_proposer(rule, 3)):
        engine = make_engine(rule, 3, proposer=proposer, num_draft_tokens=length)
        params = SamplingParams(temperature=0, max_tokens=6, presence_penalty=0.5)
        assert run_requests(engine, make_requests([[2]], params))["r0"].token_ids == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_token_biased_by_minus_100_never_comes_out(temperature, verification):
    """E4: it is the favourite, and all that the drafter proposes."""
    rule = table_rule([0.97, 0.02, 0.01])
    engine = make_engine(
        rule, 3, proposer=FunctionProposer(lambda c: [0] * c.num_draft_tokens), verification=verification
    )
    params = SamplingParams(temperature=temperature, max_tokens=40, logit_bias={0: -100})
    assert 0 not in run_requests(engine, make_requests([[2]], params))["r0"].token_ids


@pytest.mark.parametrize("length", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_targets(temperature, length):
    """F1: of a known table, for every token, before temperature and penalties; the top three complete."""
    table = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    rule = table_rule(table)
    engine = make_engine(rule, 5, proposer=soft_proposer(rule, 5), num_draft_tokens=length)
    params = SamplingParams(temperature=temperature, max_tokens=30, logprobs=3, presence_penalty=0.5, top_k=4)
    transcript = run_requests(engine, make_requests([[2]], params))["r0"]
    assert [entry.token_id for entry in transcript.logprobs] == transcript.token_ids
    for entry in transcript.logprobs:
        assert entry.logprob == pytest.approx(np.log(table[entry.token_id]), abs=1e-4)
        assert [token_id for token_id, _ in entry.top] == [0, 1, 2]
        assert [logprob for _, logprob in entry.top] == pytest.approx(np.log(table[:3]), abs=1e-4)


def test_logprobs_belong_to_their_request_and_position():
    """F2: four requests with 0, 1, 3 and 2 of 3 drafted tokens accepted in each round, some asking and some not."""
    right_for = {"r0": 0, "r1": 1, "r2": 3, "r3": 2}

    def draft(context):
        text, tokens = tuple(context.token_ids), []
        for k in range(context.num_draft_tokens):
            tokens.append(int(np.argmax(RULE(text + tuple(tokens)))))
            if k >= right_for[context.request_id]:
                tokens[-1] = (tokens[-1] + 1) % VOCAB
        return tokens

    params = [SamplingParams(temperature=0, max_tokens=13, logprobs=n) for n in (0, 2, 20, None)]
    engine = make_engine(RULE, VOCAB, proposer=FunctionProposer(draft), num_draft_tokens=3)
    prompts = [[1, 2], [3], [4, 5, 6], [7]]
    transcripts = run_requests(engine, make_requests(prompts, params))
    assert transcripts["r3"].logprobs == []
    for prompt, (request_id, num_top) in zip(prompts, {"r0": 0, "r1": 2, "r2": VOCAB}.items(), strict=False):
        text = list(prompt)
        assert len(transcripts[request_id].logprobs) == 13
        for entry in transcripts[request_id].logprobs:
            logits = RULE(tuple(text)).astype(np.float64)
            logprobs = logits - np.log(np.exp(logits).sum())
            assert entry.logprob == pytest.approx(logprobs[entry.token_id], abs=1e-4)
            assert [token_id for token_id, _ in entry.top] == np.argsort(-logits)[:num_top].tolist()
            text.append(entry.token_id)


def test_logprobs_end_where_a_stop_cuts_the_block():
    """D5, F2"""
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1)
    engine = make_engine(RULE, VOCAB, proposer=perfect_proposer(RULE), num_draft_tokens=7)
    stop_id = run_requests(engine, make_requests([[3, 1]], params))["r0"].token_ids[5]
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1, stop_token_ids=[stop_id])
    transcript = run_requests(engine, make_requests([[3, 1]], params))["r0"]
    assert [entry.token_id for entry in transcript.logprobs] == transcript.token_ids
    assert len(transcript.token_ids) <= 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"bad_token_ids": [VOCAB]}, "bad_token_ids"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"bad_token_ids": range(VOCAB)}, "bad_token_ids"),
        ({"allowed_token_ids": [1], "logit_bias": {1: -100}}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "bad_token_sequences": [[3, 1]]}, "allowed_token_ids"),
        ({"bad_token_sequences": [[3, VOCAB]]}, "bad_token_sequences"),
        ({"allowed_token_ids": [15], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [4], "stop_token_ids": [4], "min_tokens": 1}, "allowed_token_ids"),
        ({"stop_token_ids": range(15), "min_tokens": 1}, "stop_token_ids"),
    ],
)
def test_what_leaves_no_token_is_refused(fields, param):
    engine = make_engine(RULE, VOCAB, eos_token_ids=[15])
    with pytest.raises(RequestError) as caught:
        engine.add_request(make_requests([[1]], SamplingParams(**fields))[0])
    assert caught.value.param == param


def test_the_end_may_be_the_only_allowed_token():
    engine = make_engine(RULE, VOCAB, eos_token_ids=[15])
    transcript = run_requests(engine, make_requests([[1]], SamplingParams(allowed_token_ids=[15])))["r0"]
    assert transcript.token_ids == [15]
