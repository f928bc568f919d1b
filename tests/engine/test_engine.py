"""The loop: rounds, limits, stops, counts, faults of drafters. Cases A, D, H and L of public engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toys import (
    FunctionProposer,
    cycle_rule,
    greedy_continuation,
    hashed_rule,
    make_engine,
    make_requests,
    never_right_proposer,
    perfect_proposer,
    run_requests,
    table_rule,
)

from dspark.errors import RequestError
from dspark.request import FinishReason, Request, SamplingParams
from dspark.speculation.proposal import Draft

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def sample(engine, name: str, **labels: str) -> float:
    value = engine.metrics.registry.get_sample_value(name, {"model_name": "toy", **labels})
    assert value is not None, name
    return value


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_a_draft_token_the_target_never_wants_is_never_taken(num_draft_tokens):
    """A1: the row of the last committed token judges the first draft token."""
    engine = make_engine(
        cycle_rule(16, 10),
        16,
        proposer=FunctionProposer(lambda c: [15] * c.num_draft_tokens),
        num_draft_tokens=num_draft_tokens,
    )
    (transcript,) = run_requests(engine, make_requests([[0]], GREEDY)).values()
    assert transcript.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert sample(engine, "vllm:spec_decode_num_accepted_tokens_total") == 0
    assert transcript.last.speculation.accepted_length == 1.0


def test_a_drafter_that_is_the_target_is_fully_accepted():
    """A6, B14: the prefill token, then gamma + 1 per round; 41 tokens take 1 + ceil(40 / 5) passes."""
    rule = hashed_rule(16)
    engine = make_engine(rule, 16, proposer=perfect_proposer(rule), num_draft_tokens=4)
    (transcript,) = run_requests(
        engine, make_requests([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=41))
    ).values()
    assert engine.runner.num_passes == 9
    stats = transcript.last.speculation
    assert (stats.num_verified, stats.num_accepted, stats.num_emitted, stats.num_rounds) == (32, 32, 40, 8)
    assert transcript.token_ids == greedy_continuation(rule, [1, 2, 3], 41)


def test_target_rows_per_step_are_one_plus_the_drafts():
    """J3: nothing is verified that was not scheduled."""
    lengths = iter((2, 0, 5, 1, 0, 3))
    engine = make_engine(
        hashed_rule(16), 16, proposer=FunctionProposer(lambda c: [0] * next(lengths, 0)), num_draft_tokens=5
    )
    run_requests(engine, make_requests([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9)))
    assert [sum(len(r.token_ids) for r in rows) for rows in engine.runner.rows_per_pass][:5] == [3, 3, 1, 6, 2]


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 15])
def test_a_block_never_overshoots_max_tokens(max_tokens):
    """D7, D8: exactly as many as asked, in ids, in the count and in the metrics."""
    rule = cycle_rule(16, 16)
    engine = make_engine(rule, 16, proposer=perfect_proposer(rule), num_draft_tokens=7)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    (transcript,) = run_requests(engine, make_requests([[0]], params)).values()
    assert len(transcript.token_ids) == max_tokens == transcript.last.speculation.num_emitted + 1  # 1: the prefill
    assert transcript.finish_reason is FinishReason.LENGTH
    assert sample(engine, "vllm:generation_tokens_total") == max_tokens


def test_no_draft_is_made_for_the_last_token_left():
    """D7: a round emits one token more than it verifies."""
    proposer = FunctionProposer(lambda c: [0] * c.num_draft_tokens)
    engine = make_engine(hashed_rule(16), 16, proposer=proposer, num_draft_tokens=7)
    run_requests(engine, make_requests([[1]], SamplingParams(temperature=0, max_tokens=5)))
    assert proposer.lengths == [3, 2, 1]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_inside_an_accepted_block_ends_the_text_there(ignore_eos):
    """D1, L1: the fourth token is EOS, the drafter goes on past it."""
    rule = cycle_rule(16, 16)
    engine = make_engine(rule, 16, proposer=perfect_proposer(rule), num_draft_tokens=7, eos_token_ids=[4])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=ignore_eos)
    (transcript,) = run_requests(engine, make_requests([[0]], params)).values()
    if ignore_eos:
        assert transcript.token_ids == list(range(1, 13))
        return
    assert transcript.token_ids == [1, 2, 3, 4]
    assert (transcript.text, transcript.finish_reason, transcript.stop_reason) == ("t1t2t3", "stop", None)
    stats = transcript.last.speculation
    # The target agreed with all seven drafted tokens; three of them reached the client.
    assert (stats.num_rounds, stats.num_verified, stats.num_accepted, stats.num_emitted) == (1, 7, 7, 3)


def test_a_stop_string_early_in_a_long_block_is_found():
    """D3, D5: ids, text and count end together."""
    words = ["E", "N", "D", " ", "a", *[f"w{i}" for i in range(11)]]
    target = [0, 1, 2, 3, *[4] * 30]

    def rule(context):
        row = np.full(16, -1e4, dtype=np.float32)
        row[target[len(context) - 1]] = 0
        return row

    engine = make_engine(rule, 16, proposer=perfect_proposer(rule), num_draft_tokens=8, words=words)
    params = SamplingParams(temperature=0, max_tokens=20, stop=("END",))
    (transcript,) = run_requests(engine, make_requests([[15]], params)).values()
    assert (transcript.text, transcript.stop_reason, transcript.token_ids) == ("", "END", [0, 1, 2])


def test_min_tokens_keeps_eos_away_and_speculation_does_not_change_the_text():
    """EOS is masked before min_tokens, in every row of the block."""
    rule = table_rule([0.05, 0.6, 0.3, 0.05])
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=5)
    texts = []
    for proposer in (
        None,
        FunctionProposer(lambda c: [1] * c.num_draft_tokens),
        FunctionProposer(lambda c: [2] * c.num_draft_tokens),
    ):
        engine = make_engine(rule, 4, proposer=proposer, eos_token_ids=[1])
        (transcript,) = run_requests(engine, make_requests([[0]], params)).values()
        texts.append(transcript.token_ids)
    assert texts == [[2, 2, 2, 2, 2, 1]] * 3


@pytest.mark.parametrize("prompt_len", [30, 31])
def test_a_prompt_near_the_context_end_gets_what_is_left(prompt_len):
    """D12: the speculative reserve is not part of any limit."""
    rule = hashed_rule(16)
    engine = make_engine(rule, 16, proposer=perfect_proposer(rule), max_model_len=32)
    request = make_requests([[1] * prompt_len], SamplingParams(temperature=0, ignore_eos=True))
    (transcript,) = run_requests(engine, request).values()
    assert (len(transcript.token_ids), transcript.finish_reason) == (32 - prompt_len, "length")


@pytest.mark.parametrize("prompt_len", [32, 33, 100])
def test_a_prompt_that_fills_the_context_is_refused_and_the_next_one_served(prompt_len):
    engine = make_engine(hashed_rule(16), 16, max_model_len=32)
    with pytest.raises(RequestError, match=f"the prompt has {prompt_len} tokens, but the context holds 32"):
        engine.add_request(make_requests([[1] * prompt_len], GREEDY)[0])
    assert len(run_requests(engine, make_requests([[1]], GREEDY))["r0"].token_ids) == 12


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([], GREEDY, "prompt"),
        ([16], GREEDY, "prompt"),
        ([-1], GREEDY, "prompt"),
        ([1], SamplingParams(stop_token_ids=(16,)), "stop_token_ids"),
        ([1], SamplingParams(max_tokens=128), "max_tokens"),
        ([1], SamplingParams(min_tokens=2, stop_token_ids=tuple(range(16))), "stop_token_ids"),
    ],
)
def test_a_request_the_model_cannot_serve_is_refused_by_field(prompt, sampling, param):
    engine = make_engine(hashed_rule(16), 16)
    with pytest.raises(RequestError) as caught:
        engine.add_request(Request(request_id="x", prompt_token_ids=prompt, sampling=sampling))
    assert caught.value.param == param
    assert not engine.has_unfinished()


def test_an_id_in_use_is_refused():
    engine = make_engine(hashed_rule(16), 16)
    engine.add_request(make_requests([[1]], GREEDY)[0])
    with pytest.raises(RequestError, match="request id 'r0' is in use"):
        engine.add_request(make_requests([[2]], GREEDY)[0])


def test_each_request_has_its_own_draft_length():
    """K6: speculation off for one, two a round for the other; both texts as alone."""
    rule = hashed_rule(16)
    proposer = perfect_proposer(rule)
    engine = make_engine(rule, 16, proposer=proposer)
    params = [SamplingParams(temperature=0, max_tokens=12, num_draft_tokens=k) for k in (0, 2)]
    transcripts = run_requests(engine, make_requests([[1], [2]], params))
    assert transcripts["r0"].last.speculation.num_drafted == 0
    assert max(proposer.lengths) == 2
    assert transcripts["r0"].token_ids == greedy_continuation(rule, [1], 12)
    assert transcripts["r1"].token_ids == greedy_continuation(rule, [2], 12)


UNIFORM = torch.full((1, 16), 1 / 16)
FAULTS = {
    "id too large": [Draft(token_ids=[16])],
    "negative id": [Draft(token_ids=[-1])],
    "too long": [Draft(token_ids=[1] * 99)],
    "too few": [],
    "probs of another size": [Draft(token_ids=[1], probs=UNIFORM[:, :8])],
    "probs of another type": [Draft(token_ids=[1], probs=UNIFORM.double())],
    "probs for another length": [Draft(token_ids=[1, 2], probs=UNIFORM)],
    "a token of probability 0": [Draft(token_ids=[1], probs=torch.eye(16)[:1])],
    "NaN": [Draft(token_ids=[1], probs=UNIFORM * float("nan"))],
}


@pytest.mark.parametrize("fault", ["raises", *FAULTS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_misbehaves_costs_no_token(fault, temperature, caplog):
    class Faulty(FunctionProposer):
        def propose(self, contexts):
            if fault == "raises":
                raise RuntimeError("drafter down")
            return FAULTS[fault]

    rule = hashed_rule(16)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=12)
    plain = run_requests(make_engine(rule, 16), make_requests([[1, 2]], params))["r0"].token_ids
    engine = make_engine(rule, 16, proposer=Faulty(lambda c: []))
    (transcript,) = run_requests(engine, make_requests([[1, 2]], params)).values()
    assert transcript.token_ids == plain
    assert sample(engine, "dspark:drafter_failures_total") > 0
    assert "the function drafter failed" in caplog.text


def test_logits_that_are_not_numbers_end_that_request_only():
    rule = hashed_rule(16)

    def broken(context):
        row = rule(context)
        row[9] = -np.inf  # nobody but the first request ever sees a 9
        return np.full(16, np.nan, dtype=np.float32) if 9 in context else row

    engine = make_engine(broken, 16)
    for params in (SamplingParams(temperature=1, seed=1, max_tokens=4), SamplingParams(temperature=0, max_tokens=4)):
        transcripts = run_requests(engine, make_requests([[9], [1]], params))
        assert transcripts["r0"].finish_reason is FinishReason.ERROR
        assert "NaN" in transcripts["r0"].last.error
        assert (transcripts["r1"].finish_reason, len(transcripts["r1"].token_ids)) == (FinishReason.LENGTH, 4)


def test_accepted_length_counts_the_bonus_and_the_rate_does_not():
    """L2: never right is 1.0 and 0; always right is gamma + 1 and 1."""
    rule = hashed_rule(16)
    for proposer, length, rate in ((never_right_proposer(rule, 16), 1.0, 0.0), (perfect_proposer(rule), 8.0, 1.0)):
        engine = make_engine(rule, 16, proposer=proposer, num_draft_tokens=7, max_model_len=200, page_size=8)
        run_requests(engine, make_requests([[1]], SamplingParams(temperature=0, max_tokens=1 + 8 * 3)))
        emitted, rounds = (
            sample(engine, "dspark:round_emitted_tokens_total"),
            sample(engine, "vllm:spec_decode_num_drafts_total"),
        )
        accepted, verified = (sample(engine, f"vllm:spec_decode_num_{k}_tokens_total") for k in ("accepted", "draft"))
        if rate:
            assert (emitted / rounds, accepted / verified) == (length, rate)
        else:
            assert (emitted / rounds, accepted) == (length, rate)


def test_acceptance_by_position_counts_only_what_was_verified():
    """L3: accepts 3, 1, 0 of scheduled 3, 3, 1."""
    rule = cycle_rule(16, 16)
    plans = iter([(3, 3), (3, 1), (1, 0)])

    def draft(context):
        scheduled, right = next(plans, (0, 0))
        tokens = greedy_continuation(rule, context.token_ids, scheduled)
        return tokens[:right] + [(t + 5) % 16 for t in tokens[right:]]

    engine = make_engine(rule, 16, proposer=FunctionProposer(draft), num_draft_tokens=5)
    run_requests(engine, make_requests([[0]], SamplingParams(temperature=0, max_tokens=20)))
    verified = [sample(engine, "dspark:verified_tokens_per_pos_total", position=str(k)) for k in range(3)]
    accepted = [sample(engine, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(k)) for k in range(2)]
    assert verified == [3, 2, 2]
    assert accepted == [2, 1]
    assert sample(engine, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position="2") == 1


def test_pages_return_to_the_start_after_two_hundred_mixed_endings():
    """H7: EOS, stop, length and abort at random slots of long blocks."""
    rule = hashed_rule(16)
    generator = np.random.default_rng(2)
    for page_size in (1, 4, 16):
        engine = make_engine(
            rule, 16, proposer=perfect_proposer(rule), num_draft_tokens=7, page_size=page_size,
            num_pages=256 // page_size, eos_token_ids=[3], max_model_len=64,
        )  # fmt: skip
        for i in range(200):
            params = SamplingParams(
                temperature=0, max_tokens=int(generator.integers(1, 20)), stop_token_ids=(int(generator.integers(16)),)
            )
            engine.add_request(Request(request_id=str(i), prompt_token_ids=[i % 16, i // 16], sampling=params))
            for _ in range(generator.integers(0, 3)):
                engine.step()
            if generator.random() < 0.3:
                engine.abort(str(generator.integers(i + 1)))
        while engine.has_unfinished():
            engine.step()
        engine.check_integrity()
        assert engine.allocator.num_used == 0


def test_thirty_three_requests_drain_one_by_one_to_their_own_texts():
    """J8: lengths 1 to 33, no step without requests calls the model, then one request more."""
    rule = hashed_rule(16)
    engine = make_engine(
        rule, 16, proposer=perfect_proposer(rule), num_draft_tokens=7, max_batch_size=33, num_pages=512
    )
    prompts = [[i % 16, i // 16] for i in range(33)]
    params = [SamplingParams(temperature=0, max_tokens=i + 1) for i in range(33)]
    transcripts = run_requests(engine, make_requests(prompts, params))
    for i in range(33):
        assert transcripts[f"r{i}"].token_ids == greedy_continuation(rule, prompts[i], i + 1)
    passes = engine.runner.num_passes
    assert engine.step() == []
    assert engine.runner.num_passes == passes
    assert len(run_requests(engine, make_requests([[5]], GREEDY))["r0"].token_ids) == 12


def test_every_position_is_written_where_its_page_says():
    """H14: a shuffled free list, a shared prefix, blocks of drafts over two page borders; the toy target reads
    its context back through the page table, and shared pages are never written."""
    rule = hashed_rule(16)
    engine = make_engine(rule, 16, proposer=perfect_proposer(rule), num_draft_tokens=7, page_size=4, num_pages=64)
    np.random.default_rng(5).shuffle(engine.allocator._free)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    run_requests(engine, make_requests([prompt], GREEDY, prefix="first"))
    shared = engine.allocator.acquire_prefix(engine_hashes(prompt, 2))
    before = engine.runner.pool.reshape(-1, 4)[shared].copy()
    engine.allocator.release(shared)
    transcripts = run_requests(engine, make_requests([prompt, [*prompt, 1]], GREEDY))
    assert transcripts["r0"].token_ids == greedy_continuation(rule, prompt, 12)
    assert transcripts["r1"].token_ids == greedy_continuation(rule, [*prompt, 1], 12)
    assert (engine.runner.pool.reshape(-1, 4)[shared] == before).all()
    assert transcripts["r0"].last.num_cached_tokens == 8


def engine_hashes(prompt: list[int], num_pages: int) -> list[bytes]:
    from dspark.engine.page_allocator import ROOT_HASH, page_hash

    hashes = [ROOT_HASH]
    for i in range(num_pages):
        hashes.append(page_hash(hashes[-1], prompt[4 * i : 4 * i + 4]))
    return hashes[1:]


def test_rejected_tokens_never_enter_the_prefix_cache():
    """B10, H16: the index holds committed tokens only."""
    rule = hashed_rule(16)
    engine = make_engine(rule, 16, proposer=never_right_proposer(rule, 16), num_draft_tokens=7, page_size=1)
    (transcript,) = run_requests(engine, make_requests([[1, 2]], GREEDY)).values()
    text = [1, 2, *transcript.token_ids]
    assert engine.allocator.num_cached == len(text) - 1
    wrong = [1, 2, (transcript.token_ids[0] + 1) % 16, 0]
    (second,) = run_requests(engine, make_requests([wrong], GREEDY, prefix="s")).values()
    assert second.last.num_cached_tokens == 2


def test_acceptance_after_preemption_is_that_of_an_undisturbed_run():
    """H11: the perfect drafter stays perfect for a request that was sent back and prefilled again in chunks."""
    rule = hashed_rule(16)
    params = SamplingParams(temperature=0, max_tokens=20)
    engine = make_engine(
        rule, 16, proposer=perfect_proposer(rule), num_draft_tokens=3, page_size=1, num_pages=30, max_model_len=28,
        max_batch_tokens=16, prefix_caching=False,
    )  # fmt: skip
    transcripts = run_requests(engine, make_requests([[1], [2]], params))
    assert sample(engine, "vllm:num_preemptions_total") > 0
    for transcript in transcripts.values():
        assert transcript.last.speculation.acceptance_rate == 1.0
    assert transcripts["r1"].token_ids == greedy_continuation(rule, [2], 20)


def test_time_per_token_is_not_the_time_between_chunks(monkeypatch):
    """L4: rounds of four tokens, 40 ms each: 10 ms a token, and the token counter says 41."""
    now = [0.0]
    monkeypatch.setattr("dspark.engine.engine.time.monotonic", lambda: now[0])
    rule = hashed_rule(16)

    def slow(context):
        return rule(context)

    engine = make_engine(slow, 16, proposer=perfect_proposer(rule), num_draft_tokens=3)
    engine.add_request(make_requests([[1]], SamplingParams(temperature=0, max_tokens=41))[0])
    while engine.has_unfinished():
        now[0] += 0.04
        engine.step()
    assert sample(engine, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.01)
    assert sample(engine, "vllm:generation_tokens_total") == 41


def test_an_empty_step_costs_no_pass():
    engine = make_engine(hashed_rule(16), 16)
    assert engine.step() == []
    assert engine.runner.num_passes == 0
