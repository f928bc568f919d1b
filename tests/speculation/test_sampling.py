"""What the distribution of a request is, and that draws follow it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from dspark.request import SamplingParams
from dspark.speculation.noise import KeyedNoise
from dspark.speculation.sampling import (
    INVALID_TOKEN,
    greedy_tokens,
    mask_token_ids,
    race,
    sample_from,
    sample_tokens,
    target_probs,
)

PROBS = [0.4, 0.3, 0.2, 0.1]


def probs_of(logits, **params) -> list[float]:
    tensor = torch.tensor([logits], dtype=torch.float32)
    probs, is_usable = target_probs(tensor, [SamplingParams(**params)])
    assert is_usable.tolist() == [True]
    return probs[0].tolist()


def log(probs) -> list[float]:
    return [math.log(p) if p > 0 else -math.inf for p in probs]


def naive_probs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The obvious way: sort everything, one filter after the other, in float64."""
    if params.is_greedy:
        return np.eye(len(logits))[int(np.argmax(logits))]
    z = logits.astype(np.float64) / params.temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-logits, kind="stable")
    if 0 < params.top_k < len(p):
        p[order[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        cumulative = np.cumsum(p[order])
        p[order[int((cumulative < params.top_p).sum()) + 1 :]] = 0
        p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def test_temperature_divides_the_logits():
    """Case B6."""
    e = [math.exp(4), math.exp(2), 1.0]
    assert probs_of([2, 1, 0], temperature=0.5) == pytest.approx([x / sum(e) for x in e], abs=1e-6)


def test_temperature_and_top_k_work_together():
    """Case B6."""
    for temperature in (0.5, 2.0):
        e = math.exp(1 / temperature)
        expected = [e / (e + 1), 1 / (e + 1), 0.0]
        assert probs_of([2, 1, 0], temperature=temperature, top_k=2) == pytest.approx(expected, abs=1e-6)


def test_top_p_keeps_the_token_that_crosses_the_mass():
    assert probs_of(log(PROBS), top_p=0.6) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-6)


def test_top_p_works_on_the_renormalised_top_k():
    # of the two that top_k leaves, the first has .4 / .7 = .571, which is enough; of all four it has .4, which is not
    assert probs_of(log(PROBS), top_k=2, top_p=0.55) == [1, 0, 0, 0]
    assert probs_of(log(PROBS), top_p=0.55) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-6)


def test_min_p_is_relative_to_the_maximum():
    assert probs_of(log(PROBS), min_p=0.45) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0], abs=1e-6)
    assert probs_of(log(PROBS), min_p=1.0) == [1, 0, 0, 0]


def test_probabilities_outside_the_support_are_exactly_zero():
    assert probs_of(log(PROBS), top_k=3)[3] == 0.0
    assert probs_of(log(PROBS), top_p=0.35)[1:] == [0.0, 0.0, 0.0]


def test_of_equal_logits_at_the_edge_the_lowest_ids_stay():
    assert probs_of([1, 2, 1, 1], top_k=2)[2:] == [0.0, 0.0]
    assert probs_of([0, 0, 0, 0], top_k=1) == [1, 0, 0, 0]
    assert probs_of([0, 0, 0, 0], top_p=0.5) == [0.5, 0.5, 0, 0]


def test_top_k_alone_keeps_tokens_too_rare_to_change_a_sum():
    probs = probs_of([0, -50, -60], top_k=2)
    assert probs == [1.0, pytest.approx(math.exp(-50), rel=1e-5, abs=0), 0.0]


def test_top_k_larger_than_the_vocabulary_and_minus_one_are_off():
    for top_k in (4, 5, -1):
        assert probs_of(log(PROBS), top_k=top_k) == pytest.approx(PROBS, abs=1e-6)


@pytest.mark.parametrize("temperature", [0, 1e-10, 1e-6])
def test_a_temperature_near_zero_is_greedy(temperature):
    """Case B9."""
    assert probs_of([1, 3, 3, 2], temperature=temperature) == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1.0, 1e300])
def test_extreme_logits_and_temperatures_give_no_nan(temperature):
    """Case B9."""
    probs = probs_of([1e4, -1e4, -math.inf, 1e4 - 1], temperature=temperature)
    assert sum(probs) == pytest.approx(1.0, abs=1e-6)
    assert probs[2] == 0.0


def test_unusable_rows_are_told_and_do_not_harm_others():
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[0, nan, 0], [-inf, -inf, -inf], [0, inf, 0], [0, -inf, 0]])
    for params in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0}):
        probs, is_usable = target_probs(logits, [SamplingParams(**params)] * 4)
        assert is_usable.tolist() == [False, False, False, True]
        assert probs[3].sum().item() == pytest.approx(1.0)
    assert greedy_tokens(logits) == [INVALID_TOKEN, INVALID_TOKEN, INVALID_TOKEN, 0]


def test_logits_are_left_as_they_are():
    logits = torch.tensor([log(PROBS)])
    before = logits.clone()
    target_probs(logits, [SamplingParams(temperature=0.5, top_k=2, top_p=0.5, min_p=0.2)])
    assert torch.equal(logits, before)


GRID = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product((0, 0.7, 1.5), (0, 1, 3, 300), (0.3, 0.95, 1.0), (0, 0.1))
]


@pytest.mark.parametrize("vocab_size", [5, 700, 5000])
def test_a_batch_of_mixed_settings_equals_the_naive_filters(vocab_size):
    """Distinct logits, so that float32 cannot change an order; a nucleus of 5000 needs every window."""
    generator = np.random.default_rng(vocab_size)
    logits = np.stack([generator.permutation(vocab_size) * (4.0 / vocab_size) for _ in GRID]).astype(np.float32)
    probs, is_usable = target_probs(torch.from_numpy(logits), GRID)
    assert is_usable.all()
    for row, params, got in zip(logits, GRID, probs.numpy(), strict=True):
        expected = naive_probs(row, params)
        # a float32 sum may put one token more or less on the crossing, whose mass is at most 1/100 here
        tolerance = 1e-5 if vocab_size == 5 else 1e-6 + 2 * expected[expected > 0].min()
        assert np.abs(got - expected).max() <= tolerance, params
        assert abs(int((got > 0).sum()) - int((expected > 0).sum())) <= 1, params


def test_a_row_has_the_same_probabilities_alone_and_in_a_batch():
    """Case B13."""
    logits = torch.randn(len(GRID), 600, generator=torch.Generator().manual_seed(0))
    together, _ = target_probs(logits, GRID)
    for i, params in enumerate(GRID):
        alone, _ = target_probs(logits[i : i + 1], [params])
        assert torch.equal(alone[0], together[i])


def test_sampling_inverts_the_distribution_function():
    weights = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])
    drawn = [sample_from(weights, k / 8) for k in range(8)]
    assert drawn == [0, 0, 0, 0, 2, 2, 3, 4]


def test_weights_need_not_be_normalised():
    weights = torch.tensor([3.0, 0.0, 1.0])
    assert [sample_from(weights, u) for u in (0.0, 0.7499, 0.7501, 1 - 2**-53)] == [0, 0, 2, 2]


def test_the_last_uniform_never_draws_a_token_of_weight_zero():
    """Case B9: the sum of float32 probabilities may stay below 1."""
    for weights in ([0.0, 0.3, 0.3, 0.0, 0.0], [0.99999994, 0.0], [1e-30, 0.0, 0.0]):
        tensor = torch.tensor(weights)
        for uniform in (0.0, 0.5, 1 - 2**-53):
            assert weights[sample_from(tensor, uniform)] > 0


def test_rows_are_drawn_with_their_own_uniforms():
    weights = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.0, 1.0]])
    assert sample_tokens(weights, [0.1, 0.9, 0.0]) == [0, 1, 1]
    assert sample_tokens(weights[:0], []) == []


def test_small_probabilities_at_the_end_keep_their_share():
    """49152 tokens; the last has mass 2**-30, which a float32 running sum would lose."""
    weights = torch.full((49152,), 1 / 49152)
    weights[-1] = 2.0**-30
    total = float(weights.double().sum())
    assert sample_from(weights, 1 - 0.99 * 2.0**-30 / total) == 49151
    assert sample_from(weights, 1 - 1.01 * 2.0**-30 / total) == 49150


def test_the_race_is_won_by_the_clock_that_rings_first():
    clocks = np.array([1.0, 0.5, 0.2], dtype=np.float32)
    assert race(torch.tensor([0.5, 0.4, 0.1]), clocks) == 1  # they ring at 2.0, 1.25 and 2.0
    assert race(torch.tensor([0.8, 0.2, 0.0]), clocks) == 0  # at 1.25, 2.5 and never


def test_a_race_never_draws_a_token_of_probability_zero():
    clocks = np.array([1e-30, 16.0, 1e-30], dtype=np.float32)
    assert race(torch.tensor([0.0, 1.0, 0.0]), clocks) == 1


def test_a_race_follows_the_probabilities():
    """Chi-square of 20000 races over 4 tokens, 3 degrees; false-alarm probability 1e-6 at the limit 30.7."""
    probs = torch.tensor(PROBS)
    noise = KeyedNoise(11)
    counts = np.bincount([race(probs, noise.exponential(i, 4)) for i in range(20_000)], minlength=4)
    expected = 20_000 * np.array(PROBS)
    assert float(((counts - expected) ** 2 / expected).sum()) < 30.7


def test_masked_ids_are_impossible_in_their_rows_only():
    logits = torch.zeros(3, 4)
    mask_token_ids(logits, slice(0, 2), [1, 3])
    assert logits.isneginf().tolist() == [[False, True, False, True]] * 2 + [[False] * 4]
    mask_token_ids(logits, slice(0, 3), [])
    assert greedy_tokens(logits) == [0, 0, 0]


def test_greedy_takes_the_lowest_id_on_ties():
    assert greedy_tokens(torch.tensor([[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]])) == [1, 0]
