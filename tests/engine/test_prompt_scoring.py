"""Log-probabilities of prompts: those of one uninterrupted pass, whatever cache, chunks and neighbours do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from dspark_bench import VOCAB as TINY_VOCAB
from dspark_bench import RecordingProposer, engine_over, stored_drafter
from toys import (
    greedy_continuation,
    hashed_rule,
    make_engine,
    make_requests,
    perfect_proposer,
    random_prompts,
    run_requests,
    table_rule,
)

import dspark.engine.prompt_scoring
from dspark import LLM
from dspark.batch import BatchRow
from dspark.errors import RequestError
from dspark.request import FinishReason, SamplingParams, TokenLogprobs
from dspark.speculation.ngram import NgramProposer

VOCAB = 16
RULE = hashed_rule(VOCAB)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def expected_entries(prompt: list[int], num_top: int) -> list[tuple[int, float, list[int], int]]:
    """Return token, log-probability, likeliest tokens and rank of each prompt token but the first, by definition."""
    entries = []
    for k, token_id in enumerate(prompt[1:], start=1):
        logits = RULE(tuple(prompt[:k])).astype(np.float64)
        order = np.argsort(-logits).tolist()
        logprob = logits[token_id] - np.log(np.exp(logits).sum())
        entries.append((token_id, pytest.approx(logprob, abs=1e-4), order[:num_top], order.index(token_id) + 1))
    return entries


def shown(entries: list[TokenLogprobs | None] | None) -> list[tuple[int, float, list[int], int | None]]:
    assert entries is not None
    assert entries[0] is None
    return [(e.token_id, e.logprob, [i for i, _ in e.top], e.rank) for e in entries[1:] if e is not None]


def count(engine, name: str) -> float:
    return engine.metrics.registry.get_sample_value(name, {"model_name": "toy"})


@pytest.mark.parametrize("proposer", [None, perfect_proposer(RULE), NgramProposer()])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_a_prompt_sent_twice_has_the_same_logprobs_although_its_pages_are_cached(proposer, max_tokens):
    """F3: nine tokens, the first without, eight values."""
    engine = make_engine(RULE, VOCAB, proposer=proposer)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=2)
    for _ in range(2):
        transcript = run_requests(engine, make_requests([PROMPT], params))["r0"]
        assert len(transcript.prompt_logprobs) == 9
        assert shown(transcript.prompt_logprobs) == expected_entries(PROMPT, 2)
        assert transcript.token_ids == greedy_continuation(RULE, PROMPT, max_tokens)
        assert transcript.finish_reason is FinishReason.LENGTH
        assert transcript.last.num_cached_tokens == 0


def test_a_scored_prompt_is_found_in_the_cache_by_others():
    """F3: also where no token was wanted."""
    engine = make_engine(RULE, VOCAB)
    run_requests(engine, make_requests([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=0)))
    transcript = run_requests(engine, make_requests([PROMPT], SamplingParams(temperature=0, max_tokens=3)))["r0"]
    assert transcript.last.num_cached_tokens == 8
    assert transcript.prompt_logprobs is None
    assert transcript.token_ids == greedy_continuation(RULE, PROMPT, 3)


def test_a_prompt_of_one_token_has_nothing_to_score():
    for max_tokens in (0, 2):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=1)
        transcript = run_requests(make_engine(RULE, VOCAB), make_requests([[5]], params))["r0"]
        assert transcript.prompt_logprobs == [None]
        assert len(transcript.token_ids) == max_tokens


@pytest.mark.parametrize("max_rows", [1, 5, 128])
@pytest.mark.parametrize("max_batch_tokens", [16, 64])
def test_chunks_neighbours_and_preemption_change_nothing(monkeypatch, max_rows, max_batch_tokens):
    """F2, F3: some ask and some do not, in a pool too small for all; logits are held a few rows at a time."""
    monkeypatch.setattr(dspark.engine.prompt_scoring, "MAX_ROWS", max_rows)
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens, prompt_logprobs=num_top)
        for i, (temperature, max_tokens, num_top) in enumerate(itertools.product((0, 1), (0, 14), (0, 3)))
    ]
    params += [SamplingParams(temperature=0, max_tokens=20)] * 3
    prompts = random_prompts(len(params), VOCAB, low=9, high=40, seed=6)
    engine = make_engine(
        RULE, VOCAB, proposer=perfect_proposer(RULE), num_pages=32, max_model_len=80, max_batch_tokens=max_batch_tokens
    )
    for prefix in ("first", "second"):  # the second time all pages of prompts may be in the cache
        transcripts = run_requests(engine, make_requests(prompts, params, prefix))
        for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            transcript = transcripts[f"{prefix}{i}"]
            assert len(transcript.token_ids) == sampling.max_tokens
            if sampling.prompt_logprobs is None:
                assert transcript.prompt_logprobs is None
            else:
                assert shown(transcript.prompt_logprobs) == expected_entries(prompt, sampling.prompt_logprobs)
    assert count(engine, "vllm:num_preemptions_total") > 0


def test_what_was_scored_before_a_preemption_is_not_scored_again():
    """Its pages may come from the cache again, the ones after them may not."""
    engine = make_engine(RULE, VOCAB, max_batch_tokens=16, num_pages=8)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    prompt = random_prompts(1, VOCAB, low=25, high=25)[0]
    run_requests(engine, make_requests([prompt], SamplingParams(max_tokens=1)))
    engine.add_request(make_requests([prompt], params)[0])
    engine.step()
    (sequence,) = engine.scheduler.running
    assert (sequence.num_computed, len(sequence.prompt_logprobs)) == (16, 16)
    engine.scheduler._preempt_latest()
    outputs = [output for _ in range(2) for output in engine.step()]
    assert engine.runner.rows_per_pass[-2][0].start_position == 16
    assert [output.prompt_logprobs is None for output in outputs] == [False, True]
    assert shown(outputs[0].prompt_logprobs) == expected_entries(prompt, 0)


@pytest.mark.parametrize("drafter", ["deepspec_gated", "speculators_fill_in"])
def test_a_real_decoder_scores_a_prompt_as_one_pass_over_it_does(drafter):
    """F3: in chunks beside others that draft, and drafts of the scored requests stay those of plain decoding."""
    prompts = random_prompts(4, TINY_VOCAB, low=9, high=37, seed=9)
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=3)
    engine = engine_over(RecordingProposer(stored_drafter(drafter)), chunk=16)
    for _ in range(2):
        transcripts = run_requests(engine, make_requests(prompts, params))
        for i, prompt in enumerate(prompts):
            plain = run_requests(
                engine_over(None), make_requests([prompt], SamplingParams(temperature=0, max_tokens=8))
            )
            assert transcripts[f"r{i}"].token_ids == plain["r0"].token_ids
            runner = engine_over(None).runner
            runner.execute([BatchRow(token_ids=prompt, start_position=0, page_ids=range(-(-len(prompt) // 4)))])
            logprobs = torch.log_softmax(runner.logits_of(range(len(prompt) - 1)), dim=-1)
            found = transcripts[f"r{i}"].prompt_logprobs[1:]
            assert [e.token_id for e in found] == prompt[1:]
            np.testing.assert_allclose(
                [e.logprob for e in found], logprobs[range(len(prompt) - 1), prompt[1:]], rtol=0, atol=1e-4
            )
            assert [[t for t, _ in e.top] for e in found] == logprobs.topk(3).indices.tolist()


def test_prompt_logprobs_are_before_any_processing():
    table = np.array([0.4, 0.3, 0.2, 0.1])
    params = SamplingParams(
        temperature=0.3, top_k=1, max_tokens=2, prompt_logprobs=4, presence_penalty=2, logit_bias={3: -100}, seed=1
    )
    transcript = run_requests(make_engine(table_rule(table), 4), make_requests([[0, 3, 1]], params))["r0"]
    assert [e.logprob for e in transcript.prompt_logprobs[1:]] == pytest.approx(np.log([0.1, 0.3]), abs=1e-5)
    assert [e.rank for e in transcript.prompt_logprobs[1:]] == [4, 2]


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_prompt_whose_logits_are_not_numbers_ends_its_request_alone(max_tokens):
    def broken(context):
        return np.full(VOCAB, np.nan, dtype=np.float32) if context[-2:] == (9, 9) else RULE(context)

    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=1)
    transcripts = run_requests(make_engine(broken, VOCAB), make_requests([[9, 9, 1], [2, 3]], params))
    assert transcripts["r0"].finish_reason is FinishReason.ERROR
    assert "NaN" in transcripts["r0"].last.error
    assert transcripts["r0"].prompt_logprobs is None
    assert shown(transcripts["r1"].prompt_logprobs) == expected_entries([2, 3], 1)


def test_no_token_at_all_is_refused_unless_the_prompt_is_to_be_scored():
    """D7: max_tokens 0 would compute a prompt for nobody."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=0)
    assert caught.value.param == "max_tokens"
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


@pytest.mark.parametrize("value", [-1, 21, True, 1.5])
def test_a_wrong_number_of_prompt_logprobs_is_refused(value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(prompt_logprobs=value)
    assert caught.value.param == "prompt_logprobs"


def test_a_prompt_that_fills_the_context_can_be_scored():
    """D12: room for an answer is needed by those who want one."""
    engine = make_engine(RULE, VOCAB, max_model_len=32)
    prompt = random_prompts(1, VOCAB, low=32, high=32)[0]
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    transcript = run_requests(engine, make_requests([prompt], params))["r0"]
    assert shown(transcript.prompt_logprobs) == expected_entries(prompt, 1)
    with pytest.raises(RequestError, match="the context holds 32"):
        engine.add_request(make_requests([[*prompt, 1]], params)[0])


def test_an_abort_in_mid_prefill_tells_no_part_of_them():
    engine = make_engine(RULE, VOCAB, max_batch_tokens=16)
    prompt = random_prompts(1, VOCAB, low=40, high=40)[0]
    engine.add_request(make_requests([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1))[0])
    assert engine.step() == []
    engine.abort("r0")
    (output,) = engine.step()
    assert (output.finish_reason, output.prompt_logprobs) == (FinishReason.ABORT, None)


def test_python_gets_them_with_the_completion():
    llm = LLM.from_engine(make_engine(RULE, VOCAB, proposer=perfect_proposer(RULE)))
    params = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1)
    scored, plain = llm.generate(
        [PROMPT, PROMPT], [params, SamplingParams(temperature=0, max_tokens=5)], show_progress=False
    )
    assert shown(scored.prompt_logprobs) == expected_entries(PROMPT, 1)
    assert (plain.prompt_logprobs, plain.token_ids) == (None, scored.token_ids)
