"""Sampling parameters refuse what is out of range, by field."""

from __future__ import annotations

import math

import pytest

from dspark.errors import RequestError
from dspark.request import SamplingParams, SpeculationStats


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
        ("temperature", True), ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 2),
        ("top_k", -2), ("top_k", 1.5), ("seed", 2**63), ("seed", 1.0), ("max_tokens", 0), ("max_tokens", -1),
        ("min_tokens", -1), ("num_draft_tokens", -1), ("num_draft_tokens", 65), ("stop", ("",)), ("stop", ("a",) * 17),
        ("stop", (3,)),
        ("presence_penalty", 2.5), ("frequency_penalty", math.nan), ("repetition_penalty", 0.0), ("logprobs", 21),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 100.5}), ("logit_bias", {1: math.nan}), ("logit_bias", [1]),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)), ("bad_token_ids", (-1,)), ("allowed_token_ids", ()),
        ("allowed_token_ids", ("a",)), ("bad_token_sequences", ((),)), ("bad_token_sequences", ((1, -1),)),
        ("bad_token_sequences", ((1, 2),) * 513),
        ("stop", ("x" * 1025,)), ("stop_token_ids", (1,) * 1025), ("stop_token_ids", (-1,)), ("stop_token_ids", ("a",)),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_field(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError, match=r"min_tokens \(5\) exceeds max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_one_stop_string_may_stand_alone():
    assert SamplingParams(stop="END").stop == ("END",)


def test_a_bias_of_minus_100_bans_and_a_smaller_one_does_not():
    params = SamplingParams(
        logit_bias={3: -100, 4: -99.9, 5: 100}, bad_token_ids=[7], bad_token_sequences=[[8], [9, 10]]
    )
    assert params.banned_token_ids == {3, 7, 8}


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0.0, True), (1e-10, True), (1e-6, True), (1e-3, False)])
def test_a_tiny_temperature_is_greedy(temperature, is_greedy):
    """B9"""
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_the_length_includes_the_bonus_and_the_rate_does_not():
    """L2"""
    stats = SpeculationStats(num_rounds=3, num_verified=21, num_accepted=21, num_emitted=24)
    assert (stats.accepted_length, stats.acceptance_rate) == (8.0, 1.0)
    assert (SpeculationStats().accepted_length, SpeculationStats().acceptance_rate) == (0.0, 0.0)


def test_counts_add_up_field_by_field():
    one = SpeculationStats(num_rounds=1, num_drafted=5, num_verified=4, num_accepted=2, num_emitted=3)
    assert one.plus(one) == SpeculationStats(
        num_rounds=2, num_drafted=10, num_verified=8, num_accepted=4, num_emitted=6
    )


def test_rounds_are_counted_by_how_many_tokens_they_accepted():
    stats = SpeculationStats()
    for num_verified, num_accepted in ((4, 2), (0, 0), (3, 0), (4, 4), (1, 0)):
        before = stats.accepted_counts
        stats.count_round(num_verified=num_verified, num_accepted=num_accepted, num_emitted=num_accepted + 1)
    assert stats == SpeculationStats(
        num_rounds=5, num_verified=12, num_accepted=6, num_emitted=11, accepted_counts=(2, 0, 1, 0, 1)
    )
    assert before == (1, 0, 1, 0, 1)  # what was handed out stays as it was
    both = stats.plus(SpeculationStats(accepted_counts=(1,), max_draft_tokens=5))
    assert (both.accepted_counts, both.max_draft_tokens) == ((3, 0, 1, 0, 1), 5)
