"""Keyed noise: pure functions of their keys, independent across keys, uniform and exponential."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dspark.speculation.noise import KeyedNoise, NoisePurpose, exponentials_of

P = NoisePurpose


def test_the_streams_never_change_between_versions():
    noise = KeyedNoise(42)
    assert noise.uniform(P.ACCEPTANCE, anchor_position=7, position=9) == 0.7937748604863074
    assert noise.exponential(9, 3).tolist() == pytest.approx([1.098913, 1.300217, 0.04058391], rel=1e-6)


def test_uniform_is_the_first_philox_word_of_its_key():
    raw = np.random.Philox(key=[42, 0], counter=[0, 9, 7, P.ACCEPTANCE]).random_raw()
    assert KeyedNoise(42).uniform(P.ACCEPTANCE, anchor_position=7, position=9) == (int(raw) >> 11) / 2**53


def test_a_draw_does_not_depend_on_earlier_draws():
    fresh, used = KeyedNoise(3), KeyedNoise(3)
    used.exponential(100, 1000)
    used.uniform(P.BONUS, anchor_position=5, position=6)
    key = {"anchor_position": 1, "position": 2}
    assert used.uniform(P.PROPOSAL, **key) == fresh.uniform(P.PROPOSAL, **key)
    assert (used.exponential(4, 33) == KeyedNoise(3).exponential(4, 33)).all()


def test_every_part_of_the_key_changes_the_uniform():
    values = [
        KeyedNoise(seed).uniform(purpose, anchor_position=anchor, position=position)
        for seed in (0, 1)
        for purpose in NoisePurpose
        for anchor in (10, 11)
        for position in (11, 12)
    ]
    assert len(set(values)) == 2 * 5 * 2 * 2


def test_any_integer_is_a_seed_of_its_own():
    seeds = [0, 1, -1, 2**31, 2**63 - 1, -(2**63) + 1, 2**64 - 1, 2**64, 2**100, -(2**100)]
    values = [KeyedNoise(seed).uniform(P.BONUS, anchor_position=0, position=1) for seed in seeds]
    assert len(set(values)) == len(seeds)


def test_uniforms_have_53_bits_and_stay_below_one():
    noise = KeyedNoise(5)
    values = [noise.uniform(P.ACCEPTANCE, anchor_position=0, position=i) for i in range(1000)]
    assert all(0.0 <= v < 1.0 for v in values)
    assert all((v * 2**53).is_integer() for v in values)
    assert any((v * 2**52) % 1 for v in values)


def test_a_smaller_exponential_vector_is_the_beginning_of_a_larger_one():
    whole = KeyedNoise(8).exponential(77, 49280)
    for size in (1, 2, 7, 255, 49152):
        assert (KeyedNoise(8).exponential(77, size) == whole[:size]).all()


def test_exponentials_are_float32_positive_and_finite():
    values = np.concatenate([KeyedNoise(9).exponential(position, 50_000) for position in range(40)])
    assert values.dtype == np.float32
    assert (values > 0).all() and np.isfinite(values).all()


def test_the_extreme_bits_give_exponentials_above_zero_and_below_infinity():
    values = exponentials_of(np.array([0, 1, 2**31, 2**32 - 1], dtype=np.uint32)).tolist()
    assert values == pytest.approx([2.0**-33, 1.5 * 2.0**-32, math.log(2), 24 * math.log(2)], rel=1e-6)


def test_exponentials_differ_by_position_and_seed():
    rows = [KeyedNoise(seed).exponential(position, 8).tolist() for seed in (1, 2) for position in (3, 4)]
    assert len({tuple(row) for row in rows}) == 4


def chi_square_limit(degrees: int) -> float:
    """Return the value that chi-square exceeds with probability about 1e-6 (Wilson-Hilferty, z = 4.75)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def test_uniforms_are_uniform_along_positions_and_rounds():
    """Chi-square over 64 bins, 20000 draws each; false-alarm probability 1e-6 a stream, 2e-6 in all."""
    noise = KeyedNoise(2024)
    for values in (
        [noise.uniform(P.ACCEPTANCE, anchor_position=0, position=i) for i in range(20_000)],
        [noise.uniform(P.PROPOSAL, anchor_position=i, position=i + 1) for i in range(20_000)],
    ):
        counts = np.histogram(values, bins=64, range=(0, 1))[0]
        assert chi_square(counts) < chi_square_limit(63)


def test_purposes_positions_anchors_and_seeds_are_pairwise_independent():
    """Chi-square of 16 x 16 joint bins, 20000 pairs each; false-alarm probability 1e-6 a pair, 4e-6 in all."""
    noise, other = KeyedNoise(1), KeyedNoise(2)
    base = [noise.uniform(P.PROPOSAL, anchor_position=i, position=i + 1) for i in range(20_000)]
    for partner in (
        [noise.uniform(P.ACCEPTANCE, anchor_position=i, position=i + 1) for i in range(20_000)],
        [noise.uniform(P.PROPOSAL, anchor_position=i, position=i + 2) for i in range(20_000)],
        [noise.uniform(P.PROPOSAL, anchor_position=i + 1, position=i + 1) for i in range(20_000)],
        [other.uniform(P.PROPOSAL, anchor_position=i, position=i + 1) for i in range(20_000)],
    ):
        counts = np.histogram2d(base, partner, bins=16, range=((0, 1), (0, 1)))[0]
        assert chi_square(counts) < chi_square_limit(255)


def test_exponentials_follow_their_law_down_to_small_values():
    """Chi-square over 64 equally likely bins, and of the 1/1000 smallest values over 16; false alarm 2e-6."""
    values = np.concatenate([KeyedNoise(3).exponential(i, 50_000) for i in range(20)]).astype(np.float64)
    levels = -np.expm1(-values)
    assert chi_square(np.histogram(levels, bins=64, range=(0, 1))[0]) < chi_square_limit(63)
    smallest = np.histogram(levels, bins=16, range=(0, 1e-3))[0]
    assert abs(smallest.sum() - 1000) < 5 * math.sqrt(1000)
    assert chi_square(smallest) < chi_square_limit(15)
