"""The promise: whatever the drafter, the length, the verifier or the traffic, the text is plain decoding's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from toys import (
    Transcript,
    drain,
    greedy_continuation,
    hashed_rule,
    make_engine,
    make_requests,
    never_right_proposer,
    perfect_proposer,
    random_prompts,
    random_proposer,
    right_until_proposer,
    run_requests,
    soft_proposer,
    step_once,
)

from dspark.request import SamplingParams
from dspark.speculation.ngram import NgramProposer

VOCAB = 16
RULE = hashed_rule(VOCAB)
PROMPTS = random_prompts(20, VOCAB)
LENGTHS = range(16)
PROPOSERS = {
    "perfect": lambda: perfect_proposer(RULE),
    "never": lambda: never_right_proposer(RULE, VOCAB),
    "right_until_2": lambda: right_until_proposer(RULE, VOCAB, 2),
    "random": lambda: random_proposer(VOCAB),
    "ngram": NgramProposer,
    "soft": lambda: soft_proposer(RULE, VOCAB),
}


def sampled_params(num_requests: int, max_tokens: int) -> list[SamplingParams]:
    """Seeded requests that differ in everything, greedy ones between them (B13)."""
    temperatures = itertools.cycle((0.0, 1.0, 0.5, 2.0))
    return [
        SamplingParams(
            temperature=t, seed=100 + i, max_tokens=max_tokens, top_k=(0, 5)[i % 2], top_p=(1.0, 0.9)[i % 3 == 0],
            min_p=(0.0, 0.05)[i % 5 == 0],
        )
        for i, t in zip(range(num_requests), temperatures, strict=False)
    ]  # fmt: skip


def serve_with_traffic(engine, requests, rng) -> dict[str, Transcript]:
    """Requests join at random steps; strangers come and are aborted at random steps (H9, A5)."""
    transcripts = {r.request_id: Transcript() for r in requests}
    waiting = list(requests)[::-1]
    strangers = make_requests(random_prompts(8, VOCAB, seed=9), SamplingParams(max_tokens=30), prefix="stranger")
    transcripts |= {r.request_id: Transcript() for r in strangers}
    while waiting:
        for _ in range(rng.integers(0, 4)):
            if waiting:
                engine.add_request(waiting.pop())
        if strangers and rng.random() < 0.5:
            stranger = strangers.pop()
            engine.add_request(stranger)
            for _ in range(rng.integers(0, 3)):
                step_once(engine, transcripts)
            engine.abort(stranger.request_id)
        step_once(engine, transcripts)
    drain(engine, transcripts)
    return transcripts


@pytest.fixture(scope="module")
def greedy_texts():
    return [greedy_continuation(RULE, prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_text_is_plain_decodings_for_every_drafter_and_length(name, greedy_texts):
    """A1, A2, A5, H7, H9, H15: joins, leaves, aborts and preemption in a small pool, prefix hits between prompts."""
    rng = np.random.default_rng(3)
    num_preemptions = 0.0
    for length in LENGTHS:
        page_size = (1, 4, 16)[length % 3]
        engine = make_engine(
            RULE, VOCAB, proposer=PROPOSERS[name](), num_draft_tokens=length,
            page_size=page_size, num_pages=192 // page_size, max_batch_size=6, max_batch_tokens=48, max_model_len=80,
        )  # fmt: skip
        requests = make_requests(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
        transcripts = serve_with_traffic(engine, requests, rng)
        for request in requests:
            expected = greedy_texts[int(request.request_id[1:])]
            assert transcripts[request.request_id].token_ids == expected, (length, request.request_id)
        num_preemptions += engine.metrics.registry.get_sample_value("vllm:num_preemptions_total", {"model_name": "toy"})
    assert num_preemptions > 0, "the pool is too large to show anything about preemption"


@pytest.mark.parametrize("name", PROPOSERS)
def test_seeded_text_is_that_of_seeded_plain_decoding_whatever_the_drafter_length_and_load(name):
    """C1, C3, C4, B13: alone without drafts, against a crowd with drafts, preemption and strangers."""
    params = sampled_params(len(PROMPTS), 16)
    requests = make_requests(PROMPTS, params)
    plain = {}
    for request in requests:
        plain |= run_requests(make_engine(RULE, VOCAB), [request])
    rng = np.random.default_rng(4)
    for length in (1, 3, 7, 15):
        engine = make_engine(
            RULE, VOCAB, proposer=PROPOSERS[name](), num_draft_tokens=length, num_pages=40, max_batch_size=6,
            max_model_len=80,
        )  # fmt: skip
        transcripts = serve_with_traffic(engine, requests, rng)
        for request in requests:
            assert transcripts[request.request_id].token_ids == plain[request.request_id].token_ids, (length, request)


def test_another_seed_gives_another_text():
    """C1: five equal answers for one seed between unseeded neighbours; the next seed differs."""
    engine = make_engine(RULE, VOCAB, proposer=soft_proposer(RULE, VOCAB))
    texts = []
    for seed in (42, 42, 42, 42, 42, 43):
        params = [SamplingParams(temperature=2, max_tokens=10, seed=seed), SamplingParams(temperature=2, max_tokens=7)]
        texts.append(run_requests(engine, make_requests([[1, 2], [3]], params))["r0"].token_ids)
    assert texts[0] == texts[1] == texts[2] == texts[3] == texts[4] != texts[5]


def test_nineteen_equal_seeds_among_others_give_nineteen_equal_texts():
    """C3: neighbours with other seeds do not shift a draw."""
    params = [SamplingParams(temperature=0.8, max_tokens=12, seed=1 if i % 5 else 2 + i // 5) for i in range(24)]
    engine = make_engine(RULE, VOCAB, proposer=soft_proposer(RULE, VOCAB), num_pages=256, max_batch_size=24)
    transcripts = run_requests(engine, make_requests([[5, 6, 7]] * 24, params))
    for seed in {p.seed for p in params}:
        request = make_requests([[5, 6, 7]], SamplingParams(temperature=0.8, max_tokens=12, seed=seed))
        alone = run_requests(make_engine(RULE, VOCAB), request)["r0"].token_ids
        assert all(transcripts[f"r{i}"].token_ids == alone for i, p in enumerate(params) if p.seed == seed)


def test_a_seeded_text_ends_where_a_stop_cuts_it_and_goes_on_the_same_without():
    """C5: what a discarded tail would have drawn is not spent."""
    engine = make_engine(RULE, VOCAB, proposer=soft_proposer(RULE, VOCAB), num_draft_tokens=7)
    full = run_requests(engine, make_requests([[3, 1]], SamplingParams(temperature=1, seed=9, max_tokens=20)))["r0"]
    stop_id = full.token_ids[7]
    first = full.token_ids.index(stop_id)
    params = SamplingParams(temperature=1, seed=9, max_tokens=20, stop_token_ids=(stop_id,))
    stopped = run_requests(engine, make_requests([[3, 1]], params))["r0"]
    assert stopped.token_ids == full.token_ids[: first + 1]
    rest_prompt = [3, 1, *stopped.token_ids]
    rest = run_requests(
        engine, make_requests([rest_prompt], SamplingParams(temperature=1, seed=9, max_tokens=19 - first))
    )
    assert rest["r0"].token_ids == full.token_ids[first + 1 :]
