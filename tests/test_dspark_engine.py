"""The DSpark drafter in the engine: whatever happens to a request, its drafts are those of a fresh run of its text."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from drafter_cases import DEEPSPEC, SPECULATORS, case, stage
from dspark_bench import (
    VOCAB,
    RecordingProposer,
    assert_drafts_are_fresh,
    engine_over,
    make_drafter,
    stored_drafter,
    target_taps,
)
from toys import Transcript, drain, make_requests, random_prompts, run_requests, step_once

import dspark.engine.engine
from dspark.engine.engine import Engine
from dspark.errors import RequestError
from dspark.request import FinishReason, SamplingParams
from dspark.speculation.proposal import Draft
from dspark.speculation.verification import VerificationResult

ALL = (*DEEPSPEC, *SPECULATORS)
SOME = ("deepspec_gated", "deepspec_dflash", "speculators_fill_in", "speculators_anchor_window")
PROMPTS = random_prompts(6, VOCAB, low=3, high=37, seed=3)
GREEDY = SamplingParams(temperature=0, max_tokens=14)


def sample(engine: Engine, name: str) -> float:
    return engine.metrics.registry.get_sample_value(name, {"model_name": "toy"})


@pytest.fixture(scope="module")
def plain_texts():
    """Each prompt alone, without drafts."""
    return [run_requests(engine_over(None), [r])[r.request_id].token_ids for r in make_requests(PROMPTS, GREEDY)]


def correction(plain_texts, seed=0):
    """Return what makes drafts right for a random number of positions and wrong after (these drafters are random)."""
    generator = np.random.default_rng(seed)

    def correct(context, draft: Draft) -> Draft:
        text = list(context.token_ids)
        index = next(i for i, p in enumerate(PROMPTS) if text[: len(p)] == p)
        right = plain_texts[index][len(text) - len(PROMPTS[index]) :]
        num_right = int(generator.integers(0, len(draft.token_ids) + 1))
        wrong = [(t + 1) % VOCAB for t in right[num_right : num_right + 1]]
        tokens = [*right[:num_right], *wrong, *draft.token_ids[num_right + 1 :]]
        return Draft(token_ids=tokens[: len(draft.token_ids)])

    return correct


# -- drafts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_drafts_after_every_pattern_of_acceptance_are_those_of_a_fresh_run(name, plain_texts):
    """H1, H2, H6, H13: six requests of mixed lengths; features of rejected positions, or a hole, would show."""
    proposer = RecordingProposer(stored_drafter(name), correct=correction(plain_texts))
    engine = engine_over(proposer)
    transcripts = run_requests(engine, make_requests(PROMPTS, GREEDY))
    assert [transcripts[f"r{i}"].token_ids for i in range(6)] == plain_texts
    assert sample(engine, "vllm:spec_decode_num_accepted_tokens_total") > 0
    assert assert_drafts_are_fresh(proposer) >= 6


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_drafts_do_not_depend_on_the_prefills_chunks(name, chunk, plain_texts):
    """H13. With budgets of 1 and 3 tokens most drafts are trimmed, which is a pause in drafting, too."""
    proposer = RecordingProposer(stored_drafter(name), correct=correction(plain_texts))
    engine = engine_over(proposer, chunk=chunk, max_batch_size=1)
    run_requests(engine, make_requests(PROMPTS[:2], GREEDY))
    assert assert_drafts_are_fresh(proposer) >= 4


@pytest.mark.parametrize("name", SOME)
def test_drafts_after_a_prefix_hit_are_those_of_a_fresh_run(name):
    """H16: the second request computes 3 tokens of its own."""
    proposer = RecordingProposer(stored_drafter(name))
    engine = engine_over(proposer)
    prompt = [*PROMPTS[0], *PROMPTS[1]]
    prompt = prompt[: len(prompt) // 4 * 4]
    run_requests(engine, make_requests([prompt], GREEDY))
    again = run_requests(engine, make_requests([[*prompt, 9, 8, 7]], GREEDY, prefix="s"))
    assert again["s0"].last.num_cached_tokens == len(prompt)
    assert assert_drafts_are_fresh(proposer) >= 4


@pytest.mark.parametrize("name", SOME)
def test_drafts_over_pages_of_a_request_without_drafts_are_those_of_a_fresh_run(name):
    """A conversation goes on with drafting switched on: prompt and answer of its first turn come from the cache."""
    proposer = RecordingProposer(stored_drafter(name))
    engine = engine_over(proposer, chunk=16)
    quiet = SamplingParams(temperature=0, max_tokens=14, num_draft_tokens=0)
    answer = run_requests(engine, make_requests([PROMPTS[0]], quiet))["r0"].token_ids
    assert proposer.recorded == []
    second_turn = [*PROMPTS[0], *answer, 4, 5, 6]
    again = run_requests(engine, make_requests([second_turn], GREEDY, prefix="s"))
    assert again["s0"].last.num_cached_tokens == (len(second_turn) - 4) // 4 * 4
    assert assert_drafts_are_fresh(proposer) >= 4


@pytest.mark.parametrize("name", SOME)
def test_drafts_after_a_preemption_are_those_of_a_fresh_run(name, plain_texts):
    """H11: prompt and output are prefilled again in chunks."""
    proposer = RecordingProposer(stored_drafter(name), num_pages=24, correct=correction(plain_texts))
    engine = engine_over(proposer, num_pages=24, chunk=16)
    transcripts = run_requests(engine, make_requests(PROMPTS, GREEDY))
    assert sample(engine, "vllm:num_preemptions_total") > 0
    assert [transcripts[f"r{i}"].token_ids for i in range(6)] == plain_texts
    assert assert_drafts_are_fresh(proposer) >= 6


@pytest.mark.parametrize("name", SOME)
def test_drafts_while_neighbours_are_aborted_are_those_of_a_fresh_run(name, plain_texts):
    proposer = RecordingProposer(stored_drafter(name), correct=correction(plain_texts))
    engine = engine_over(proposer)
    requests = make_requests(PROMPTS, GREEDY)
    transcripts = {r.request_id: Transcript() for r in requests}
    for number, request in enumerate(requests):
        engine.add_request(request)
        step_once(engine, transcripts)
        if number % 2:
            engine.abort(f"r{number - 1}")
            step_once(engine, transcripts)
    drain(engine, transcripts)
    assert [t.finish_reason for t in transcripts.values()] == [FinishReason.ABORT, FinishReason.LENGTH] * 3
    assert [transcripts[f"r{i}"].token_ids for i in (1, 3, 5)] == [plain_texts[i] for i in (1, 3, 5)]
    assert assert_drafts_are_fresh(proposer) >= 6


def run_scripted(monkeypatch, name: str, text: list[int], num_prompt_tokens: int) -> dict[int, list[int]]:
    """Serve a request whose answer is the rest of `text`, token by token; return the draft at each anchor position."""

    def scripted(logits, rows):
        position = rows[0].anchor_position + 1
        return [VerificationResult(num_accepted=0, token_ids=[text[position] if position < len(text) else 0])]

    monkeypatch.setattr(dspark.engine.engine, "verify_batch", scripted)
    proposer = RecordingProposer(stored_drafter(name))
    sampling = SamplingParams(temperature=0, max_tokens=len(text) - num_prompt_tokens + 8)
    run_requests(engine_over(proposer), make_requests([text[:num_prompt_tokens]], sampling))
    return {len(r.token_ids) - 1: r.draft.token_ids for r in proposer.recorded}


@pytest.mark.parametrize("name", DEEPSPEC)
def test_the_stored_deepspec_chains_come_out_of_the_engine(name, monkeypatch):
    stages = [stage(name, number) for number in range(1, 5)]
    drafts = run_scripted(monkeypatch, name, case(name)["context_token_ids"].tolist(), num_prompt_tokens=11)
    for expected in stages:
        assert drafts[expected["anchor_position"].item()] == expected["greedy_tokens"].tolist()


@pytest.mark.parametrize("name", SPECULATORS)
def test_the_stored_speculators_chains_come_out_of_the_engine(name, monkeypatch):
    expected, first = case(name), stored_drafter(name).config.first_proposal_slot
    drafts = run_scripted(monkeypatch, name, expected["input_ids"].tolist(), num_prompt_tokens=5)
    for position, chain in zip(expected["anchor_positions"].tolist(), expected["greedy_target_ids"], strict=True):
        assert drafts[position] == chain[first:].tolist()


# -- features ----------------------------------------------------------------------------------------------------


def test_features_handed_over_are_those_of_one_pass_bit_for_bit_when_prefilled_in_one():
    drafter = stored_drafter("deepspec_vanilla")
    proposer = RecordingProposer(drafter)
    prompt = [*PROMPTS[0], *PROMPTS[1]][:31]
    run_requests(engine_over(proposer), make_requests([prompt], SamplingParams(temperature=0, max_tokens=1)))
    (taken,) = proposer.taken
    assert torch.equal(taken.features, target_taps(prompt, drafter.config.tap_ids))
    assert taken.positions.tolist() == list(range(31))


def test_every_committed_position_is_handed_over_exactly_once(plain_texts):
    """H6: nothing of rejected positions, nothing twice, the last token never; values as in one pass over the text."""
    drafter = stored_drafter("speculators_anchor")
    proposer = RecordingProposer(drafter, correct=correction(plain_texts))
    run_requests(engine_over(proposer, chunk=8), make_requests(PROMPTS[:1], GREEDY))
    text = [*PROMPTS[0], *plain_texts[0]]
    positions = torch.cat([taken.positions for taken in proposer.taken]).tolist()
    assert positions == list(range(len(text) - 1))
    features = torch.cat([taken.features for taken in proposer.taken])
    torch.testing.assert_close(features, target_taps(text[:-1], drafter.config.tap_ids), atol=1e-5, rtol=1e-5)


def test_a_failure_to_take_features_costs_drafts_and_no_token(plain_texts, caplog):
    """The context has a gap: the request drafts no more, and no other request goes on from its pages."""

    class Failing(RecordingProposer):
        def take_features(self, committed):
            if 2 <= len(self.taken) < 3:
                self.taken.append(committed)
                raise RuntimeError("out of memory")
            super().take_features(committed)

    proposer = Failing(stored_drafter("deepspec_vanilla"))
    engine = engine_over(proposer)
    first = run_requests(engine, make_requests(PROMPTS[:1], GREEDY))["r0"]
    num_drafts = len(proposer.recorded)
    assert first.token_ids == plain_texts[0]
    assert sample(engine, "dspark:drafter_failures_total") == 1
    assert "the dspark drafter failed" in caplog.text
    again = run_requests(engine, make_requests([[*PROMPTS[0], *plain_texts[0], 1]], GREEDY, prefix="s"))["s0"]
    assert len(PROMPTS[0]) == 31
    assert again.last.num_cached_tokens == 32  # what the two steps before the failure committed
    assert len(proposer.recorded) > num_drafts
    assert assert_drafts_are_fresh(proposer) >= 4


def test_what_is_not_a_number_does_not_outlive_its_request_in_the_drafters_pages():
    """The next owner of a broken request's pages drafts as in a fresh pool."""
    proposer = RecordingProposer(stored_drafter("deepspec_vanilla"), num_pages=8)
    engine = engine_over(proposer, num_pages=8)
    engine.add_request(make_requests([[9] * 11], GREEDY, prefix="broken")[0])
    engine.step()
    for pool in proposer._kv_cache.pools:
        pool.fill_(float("nan"))
    engine.abort("broken0")
    engine.step()
    proposer.recorded.clear()
    run_requests(engine, make_requests([PROMPTS[3][:9]], GREEDY))
    assert assert_drafts_are_fresh(proposer) >= 4


def test_a_proposer_without_taps_gets_no_features_and_costs_no_tapped_pass():
    engine = engine_over(None)
    run_requests(engine, make_requests(PROMPTS[:1], GREEDY))
    assert engine.runner._taps is None


# -- text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_greedy_text_is_plain_decodings_for_every_drafter_and_length(name, plain_texts):
    drafter = stored_drafter(name)
    for length in range(1, 8):
        engine = engine_over(RecordingProposer(drafter), num_draft_tokens=length)
        transcripts = run_requests(engine, make_requests(PROMPTS, GREEDY))
        assert [transcripts[f"r{i}"].token_ids for i in range(6)] == plain_texts, length


@pytest.fixture(scope="module")
def seeded():
    """Seeded requests, and what plain decoding says to each alone."""
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=14, top_k=(0, 20)[i % 2]) for i in range(6)]
    requests = make_requests(PROMPTS, params)
    return requests, [run_requests(engine_over(None), [r])[r.request_id].token_ids for r in requests]


@pytest.mark.parametrize("name", ALL)
def test_seeded_text_is_plain_decodings_for_every_drafter(name, seeded):
    requests, plain = seeded
    for length in (1, 4, 7):
        engine = engine_over(RecordingProposer(stored_drafter(name)), num_draft_tokens=length)
        transcripts = run_requests(engine, requests)
        assert [transcripts[r.request_id].token_ids for r in requests] == plain, length


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_sampled_requests_are_served_with_vectors_over_a_pruned_vocabulary(verification):
    """The engine refuses vectors in which a drafted token has no probability; none is refused."""
    proposer = RecordingProposer(make_drafter(draft_vocab_size=64))
    engine = engine_over(proposer, verification=verification)
    run_requests(engine, make_requests(PROMPTS, SamplingParams(temperature=1.0, max_tokens=14)))
    assert sample(engine, "dspark:drafter_failures_total") == 0
    assert sample(engine, "vllm:spec_decode_num_draft_tokens_total") > 0
    assert all(r.draft.probs.shape[1] == VOCAB for r in proposer.recorded)


# -- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("configured", "longest"), [(None, 7), (3, 3), (0, 0)])
def test_the_draft_length_is_the_drafters_own_unless_it_is_set(configured, longest):
    proposer = RecordingProposer(stored_drafter("speculators_fill_in"))
    run_requests(engine_over(proposer, num_draft_tokens=configured), make_requests(PROMPTS[:1], GREEDY))
    assert max((len(r.draft.token_ids) for r in proposer.recorded), default=0) == longest


def test_a_request_for_longer_drafts_than_trained_is_refused_by_name():
    engine = engine_over(RecordingProposer(stored_drafter("deepspec_vanilla")))
    request = make_requests([[1, 2]], SamplingParams(num_draft_tokens=8))[0]
    with pytest.raises(RequestError, match=r"num_draft_tokens \(8\) exceeds the drafter's trained length \(7\)") as e:
        engine.add_request(request)
    assert e.value.param == "num_draft_tokens"
    engine.validate(make_requests([[1, 2]], SamplingParams(num_draft_tokens=7))[0])


def test_a_drafter_that_is_never_right_is_reported_once(caplog):
    proposer = RecordingProposer(stored_drafter("deepspec_vanilla"), correct=lambda c, d: Draft(token_ids=[0]))
    engine = engine_over(proposer)
    prompts = random_prompts(8, VOCAB, low=3, high=9, seed=1)
    with caplog.at_level(logging.WARNING):
        run_requests(engine, make_requests(prompts, SamplingParams(temperature=0, max_tokens=60)))
    assert sample(engine, "vllm:spec_decode_num_drafts_total") > 400
    assert caplog.text.count("the dspark drafter is of no use here") == 1
