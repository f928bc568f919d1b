"""Verification with keyed noise: greedy, coupled and mixed batches, edges, faults."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from enumerated_draws import EnumeratedDraws

from dspark.request import SamplingParams
from dspark.speculation.noise import KeyedNoise, NoisePurpose
from dspark.speculation.proposal import NO_DRAFT, Draft
from dspark.speculation.sampling import race, sample_from, target_probs
from dspark.speculation.verification import KeyedDraws, Pick, VerificationRow, verify_batch

GREEDY = SamplingParams(temperature=0)
METHODS = ("rejection", "block", "coupled")


def row(draft=NO_DRAFT, sampling=None, *, method="rejection", seed=0, anchor_position=10, **fields) -> VerificationRow:
    return VerificationRow(
        draft=draft,
        sampling=sampling or SamplingParams(),
        method=method,
        seed=seed,
        anchor_position=anchor_position,
        **fields,
    )


def logits_of(*probs) -> torch.Tensor:
    return torch.log(torch.tensor(probs, dtype=torch.float32))


def cycle_logits(last_token_ids, vocab_size=16, cycle=10) -> torch.Tensor:
    """T-cycle: the next token is (t + 1) mod 10 with near certainty."""
    logits = torch.zeros(len(last_token_ids), vocab_size)
    for k, token_id in enumerate(last_token_ids):
        logits[k, (token_id + 1) % cycle] = 50.0
    return logits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [1, 4])
def test_the_first_drafted_token_is_judged_too(length, method):
    """Case A1: the drafter always proposes 15, which is never in the cycle."""
    text = [0]
    while len(text) < 13:
        draft = Draft(token_ids=[15] * length)
        logits = cycle_logits([text[-1], *draft.token_ids])
        result = verify_batch(logits, [row(draft, GREEDY, method=method, anchor_position=len(text) - 1)])[0]
        assert result.num_accepted == 0
        text += result.token_ids
    assert text == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_takes_the_argmax_and_never_the_ratio(method):
    """Case A3: p = (.3, .5, .2), q = (.2, .4, .4), A proposed; p/q = 1.5 would accept it."""
    draft = Draft(token_ids=[0], probs=torch.tensor([[0.2, 0.4, 0.4]]))
    for temperature in (0.0, 1e-10, 1e-6):
        result = verify_batch(
            logits_of([0.3, 0.5, 0.2], [0.3, 0.5, 0.2]),
            [row(draft, SamplingParams(temperature=temperature), method=method)],
        )[0]
        assert (result.num_accepted, result.token_ids) == (0, [1])


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_full_acceptance_emits_the_draft_plus_one_bonus_token(method, sampling):
    """Case B14: perfect drafts of 3 give rounds of 4 tokens without gap or repeat."""
    text = [0]
    while len(text) < 17:
        drafted = [(text[-1] + k) % 10 for k in (1, 2, 3)]
        logits = cycle_logits([text[-1], *drafted])
        probs = None if sampling.is_greedy else target_probs(logits[:3], [sampling] * 3)[0]
        rows = [row(Draft(token_ids=drafted, probs=probs), sampling, method=method, anchor_position=len(text) - 1)]
        result = verify_batch(logits, rows)[0]
        assert (result.num_accepted, len(result.token_ids)) == (3, 4)
        text += result.token_ids
    assert text == [i % 10 for i in range(17)]


def test_the_bonus_comes_from_the_row_after_the_last_accepted_token():
    """Case B14."""
    logits = cycle_logits([4, 5, 6])
    assert verify_batch(logits, [row(Draft(token_ids=[5, 6]))])[0].token_ids == [5, 6, 7]


def test_plain_decoding_is_a_draft_of_length_zero():
    for method in METHODS:
        for sampling in (GREEDY, SamplingParams()):
            result = verify_batch(cycle_logits([3]), [row(sampling=sampling, method=method)])[0]
            assert (result.num_accepted, result.token_ids, result.error) == (0, [4], None)


@pytest.mark.parametrize(("num_accepted", "token_ids"), [(0, [8]), (1, [1, 8]), (2, [1, 2, 8]), (3, [1, 2, 3, 8])])
def test_greedy_keeps_the_agreeing_prefix_and_the_targets_next_token(num_accepted, token_ids):
    target = [1, 2, 3][:num_accepted] + [8] + [3] * (3 - num_accepted)
    logits = torch.nn.functional.one_hot(torch.tensor(target), 10).float()
    result = verify_batch(logits, [row(Draft(token_ids=[1, 2, 3]), GREEDY)])[0]
    assert (result.num_accepted, result.token_ids) == (num_accepted, token_ids)


def test_what_was_trimmed_from_a_draft_is_not_looked_at():
    probs = torch.tensor([[0.5, 0.5], [math.nan, math.nan]])
    draft = Draft(token_ids=[1, 0], probs=probs).prefix(1)
    results = verify_batch(logits_of([0.01, 0.99], [0.5, 0.5]), [row(draft, method="block")])
    assert results[0].num_accepted == 1


def test_the_noise_of_a_judgement_has_its_purpose_and_position():
    draft = Draft(token_ids=[0, 1], probs=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    logits = logits_of([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
    for script, purpose, position in (
        ([False], NoisePurpose.RESIDUAL, 11),
        ([True, False], NoisePurpose.RESIDUAL, 12),
        ([True, True], NoisePurpose.BONUS, 13),
    ):
        draws = EnumeratedDraws(script)
        verify_batch(logits, [row(draft, anchor_position=10)], draws=draws)
        assert [(pick.purpose, pick.position) for pick in draws.picks] == [(purpose, position)]


def test_equal_distributions_are_accepted_by_every_uniform():
    """Case B9: p == q makes the coin certain, so the empty residual is never drawn from."""
    probs = torch.tensor([[0.3, 0.3, 0.4]] * 2)
    for method in ("rejection", "block"):
        draws = EnumeratedDraws()
        logits = torch.log(torch.cat([probs, probs[:1]]))
        q = target_probs(logits[:2], [SamplingParams()] * 2)[0]
        verify_batch(logits, [row(Draft(token_ids=[2, 1], probs=q), method=method)], draws=draws)
        assert set(draws.flip_probs) == {1.0}
        draws = EnumeratedDraws([False, True])  # the second coin of a block is certain by itself
        verify_batch(logits, [row(Draft(token_ids=[2, 1], probs=q), method="block")], draws=draws)
        assert draws.flip_probs == [1.0, 1.0]


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_an_empty_residual_falls_back_to_the_target(method):
    """Case B9: a rejection that only rounding can cause."""
    q = target_probs(logits_of([0.25, 0.75]), [SamplingParams()])[0]
    draws = EnumeratedDraws([False])
    verify_batch(logits_of([0.25, 0.75], [0.5, 0.5]), [row(Draft(token_ids=[1], probs=q), method=method)], draws=draws)
    assert draws.last_token_probs == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_tiny_target_probability_is_almost_always_rejected(method):
    """Case B9: p = 1e-9 against q = .5."""
    draft = Draft(token_ids=[0], probs=torch.tensor([[0.5, 0.5]]))
    draws = EnumeratedDraws()
    verify_batch(logits_of([1e-9, 1.0], [0.5, 0.5]), [row(draft, method=method)], draws=draws)
    assert draws.flip_probs == pytest.approx([2e-9], rel=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1e-10, 1e-6, 1e-3])
@pytest.mark.parametrize("method", METHODS)
def test_extreme_logits_verify_without_nan(method, temperature):
    """Case B9: the largest logit wins at every temperature near zero."""
    logits = torch.tensor([[1e4, -1e4, -math.inf]] * 2)
    for drafted, num_accepted in ((0, 1), (1, 0), (2, 0)):
        sampling = SamplingParams(temperature=temperature)
        result = verify_batch(logits.clone(), [row(Draft(token_ids=[drafted]), sampling, method=method)])[0]
        assert (result.num_accepted, result.token_ids[-1], result.error) == (num_accepted, 0, None)


@pytest.mark.parametrize("method", METHODS)
def test_unusable_logits_end_their_own_request_only(method):
    good = cycle_logits([3, 4])
    bad = torch.full((2, 16), math.nan)
    for sampling in (GREEDY, SamplingParams()):
        rows = [row(Draft(token_ids=[4]), sampling, method=method) for _ in range(3)]
        results = verify_batch(torch.cat([good, bad, good]), rows)
        assert [result.token_ids for result in results] == [[4, 5], [], [4, 5]]
        assert results[0].error is None
        assert results[1].error is not None and "logits" in results[1].error


def test_unusable_logits_after_a_rejection_do_no_harm():
    logits = torch.cat([cycle_logits([3]), torch.full((1, 16), math.nan)])
    for method, sampling in (("rejection", None), ("coupled", None), ("rejection", GREEDY)):
        result = verify_batch(logits.clone(), [row(Draft(token_ids=[7]), sampling, method=method)])[0]
        assert (result.token_ids, result.error) == ([4], None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()], ids=["greedy", "sampled"])
def test_an_unusable_bonus_row_ends_the_request(method, sampling):
    logits = torch.cat([cycle_logits([3]), torch.full((1, 16), -math.inf)])
    result = verify_batch(logits, [row(Draft(token_ids=[4]), sampling, method=method)])[0]
    assert (result.num_accepted, result.token_ids) == (0, [])
    assert result.error is not None


def test_keyed_draws_use_the_noise_of_their_round_position_and_purpose():
    draws, case = KeyedDraws(), row(seed=-7, anchor_position=20)
    for position in (21, 25):
        key = {"anchor_position": 20, "position": position}
        uniform = KeyedNoise(-7).uniform(NoisePurpose.ACCEPTANCE, **key)
        assert not draws.is_accepted(case, position, uniform)
        assert draws.is_accepted(case, position, math.nextafter(uniform, 1.0))
        weights = torch.ones(1, 1000)
        for purpose in (NoisePurpose.RESIDUAL, NoisePurpose.BONUS):
            picks = [Pick(row=case, position=position, purpose=purpose)]
            token_id = sample_from(weights[0], KeyedNoise(-7).uniform(purpose, **key))
            assert draws.pick_tokens(picks, weights) == [token_id]
        assert draws.race_token(case, position, weights[0]) == race(
            weights[0], KeyedNoise(-7).exponential(position, 1000)
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()], ids=["greedy", "sampled"])
def test_masked_ids_cannot_come_out_before_min_tokens(method, sampling):
    """The cycle wants 5 at every row; it is masked in the first two, and drafted there it is rejected."""
    logits = torch.zeros(3, 8)
    logits[:, 5] = 50.0
    logits[:, 6] = 25.0
    fields = {"masked_token_ids": frozenset({5}), "min_tokens_left": 2}
    result = verify_batch(logits.clone(), [row(Draft(token_ids=[5, 5]), sampling, method=method, **fields)])[0]
    assert (result.num_accepted, result.token_ids) == (0, [6])
    result = verify_batch(logits.clone(), [row(Draft(token_ids=[6, 6]), sampling, method=method, **fields)])[0]
    assert (result.num_accepted, result.token_ids) == (2, [6, 6, 5])


def test_logits_from_inference_mode_may_be_masked():
    with torch.inference_mode():
        logits = cycle_logits([4])
    result = verify_batch(logits, [row(sampling=GREEDY, masked_token_ids=[5], min_tokens_left=1)])[0]
    assert result.token_ids == [0]


def random_draft(generator: np.random.Generator, length: int, vocab_size: int) -> Draft:
    probs = torch.from_numpy(generator.dirichlet(np.ones(vocab_size), size=length).astype(np.float32))
    return Draft(token_ids=generator.integers(vocab_size, size=length).tolist(), probs=probs if length else None)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 2, 0, 4, 1, 3], [3, 3, 1, 0, 0, 2]])
def test_neighbours_in_the_batch_change_nothing(order):
    """Case B13: temperatures 0, 1, 0, .5, 0, 2 with ragged lengths, in any order and alone."""
    generator = np.random.default_rng(0)
    cases = []
    for i, (temperature, length) in enumerate(zip((0, 1, 0, 0.5, 0, 2), (0, 1, 3, 7, 2, 5), strict=True)):
        logits = torch.from_numpy(generator.normal(size=(length + 1, 6)).astype(np.float32))
        draft = random_draft(generator, length, 6)
        cases.append((logits, row(draft, SamplingParams(temperature=temperature), method=METHODS[i % 3], seed=i)))
    alone = [verify_batch(logits.clone(), [case])[0] for logits, case in cases]
    together = verify_batch(torch.cat([cases[i][0] for i in order]), [cases[i][1] for i in order])
    assert together == [alone[i] for i in order]


def toy_logits(text: list[int], vocab_size: int = 8) -> torch.Tensor:
    """A target whose logits are a fixed function of the last three tokens."""
    seed = sum((token_id + 1) * 31**k for k, token_id in enumerate(text[-3:]))
    return torch.from_numpy(np.random.default_rng(seed).normal(size=vocab_size).astype(np.float32))


def decode(*, seed: int, method: str, drafts=None, num_tokens: int = 40, temperature: float = 2.0) -> list[int]:
    """Decode with the toy target; `drafts` gives the draft of each round."""
    text = [0]
    while len(text) < num_tokens + 1:
        draft = drafts() if drafts else NO_DRAFT
        logits = torch.stack([toy_logits(text + draft.token_ids[:k]) for k in range(len(draft.token_ids) + 1)])
        case = row(
            draft,
            SamplingParams(temperature=temperature),
            method=method,
            seed=seed,
            anchor_position=len(text) - 1,
        )
        text += verify_batch(logits, [case])[0].token_ids
    return text[: num_tokens + 1]


@pytest.mark.parametrize("drafter_seed", range(5))
def test_coupled_text_is_that_of_plain_seeded_decoding(drafter_seed):
    """Case C4: whatever is drafted and however long."""
    generator = np.random.default_rng(drafter_seed)
    text = decode(seed=7, method="coupled", drafts=lambda: random_draft(generator, int(generator.integers(0, 6)), 8))
    assert text == decode(seed=7, method="coupled")


def test_coupled_accepts_drafts_that_raced_with_the_same_noise():
    plain = decode(seed=3, method="coupled")
    position = 1

    def oracle() -> Draft:
        nonlocal position
        draft = Draft(token_ids=plain[position : position + 3])
        position += 4
        return draft

    assert decode(seed=3, method="coupled", drafts=oracle, num_tokens=36) == plain[:37]
    assert position == 37  # nine rounds of four tokens: every draft was accepted whole


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_reproduces_its_text_and_another_seed_does_not(method):
    """Case C1, with a drafter."""
    texts = []
    for seed in (42, 42, 42, 42, 42, 43):
        generator = np.random.default_rng(1)
        texts.append(decode(seed=seed, method=method, num_tokens=10, drafts=lambda g=generator: random_draft(g, 2, 8)))
        decode(seed=5, method=method, num_tokens=3)  # other traffic in between
    assert texts[0] == texts[1] == texts[2] == texts[3] == texts[4] != texts[5]


@pytest.mark.parametrize("method", METHODS)
def test_keyed_draws_follow_the_target(method):
    """Case B5 with real noise: 20000 seeds, chi-square with 3 degrees, false-alarm probability 1e-6 a method."""
    p, q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
    drafted = np.random.default_rng(0).choice(4, p=q, size=20_000).tolist()
    probs = torch.tensor([q])
    rows = [row(Draft(token_ids=[x], probs=probs), method=method, seed=i) for i, x in enumerate(drafted)]
    results = verify_batch(logits_of(p).repeat(40_000, 1), rows)
    counts = np.bincount([result.token_ids[0] for result in results], minlength=4)
    expected = 20_000 * np.array(p)
    assert float(((counts - expected) ** 2 / expected).sum()) < 30.7
    if method == "rejection":
        rate = np.mean([result.num_accepted for result in results])
        assert abs(rate - 0.6) < 5 * math.sqrt(0.24 / 20_000)
