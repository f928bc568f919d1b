"""Running acceptance rates: what they start from, whom they listen to, what they forget."""

from __future__ import annotations

import json

import pytest

from dspark.speculation.acceptance_rates import AcceptanceRates, Rates

PRIOR = Rates(first=0.5, later=0.25)


def test_the_expected_number_of_accepted_tokens_is_the_sum_of_the_survivals():
    assert Rates(0.5, 0.5).expected_accepted(3) == 0.5 + 0.25 + 0.125
    assert Rates(1.0, 1.0).expected_accepted(5) == 5.0
    assert Rates(0.5, 0.0).expected_accepted(5) == 0.5
    assert Rates(0.9, 0.9).expected_accepted(0) == 0.0


def test_nothing_seen_is_the_prior():
    assert AcceptanceRates(PRIOR).rates("a") == PRIOR


def test_only_what_was_judged_counts():
    """Five drafted, the third was wrong: one first token right, one later right, one later wrong."""
    rates = AcceptanceRates(PRIOR)
    rates.observe("a", num_judged=3, num_accepted=2)
    overall = Rates((1 + 20 * 0.5) / 21, (1 + 20 * 0.25) / 22)
    assert rates.rates("b").first == pytest.approx(overall.first)
    assert rates.rates("b").later == pytest.approx(overall.later)
    assert rates.rates("a").first == pytest.approx((1 + 4 * overall.first) / 5)
    assert rates.rates("a").later == pytest.approx((1 + 4 * overall.later) / 6)


def test_a_wrong_first_token_says_nothing_of_later_ones():
    rates = AcceptanceRates(PRIOR)
    rates.observe("a", num_judged=1, num_accepted=0)
    assert rates.rates("a").later == PRIOR.later
    assert rates.rates("a").first < 0.45


def test_a_request_is_judged_by_its_own_drafts_more_than_by_those_of_others():
    rates = AcceptanceRates(PRIOR)
    for _ in range(200):
        rates.observe("good", num_judged=4, num_accepted=4)
        rates.observe("bad", num_judged=1, num_accepted=0)
    assert rates.rates("good").first > 0.8
    assert rates.rates("bad").first < 0.2
    assert 0.4 < rates.rates("new").first < 0.6


def test_a_request_that_changes_is_seen_to_change_within_ten_drafts():
    rates = AcceptanceRates(PRIOR)
    for _ in range(100):
        rates.observe("a", num_judged=1, num_accepted=1)
    assert rates.rates("a").first > 0.9
    for _ in range(10):
        rates.observe("a", num_judged=1, num_accepted=0)
    assert rates.rates("a").first < 0.5


def test_the_first_rate_is_by_how_much_the_truth_exceeds_what_was_stated():
    """Stated 0.2, true 0.4: the ratio goes to 2."""
    rates = AcceptanceRates(Rates(first=1.0, later=0.5))
    for i in range(5000):
        rates.observe(str(i), num_judged=1, num_accepted=int(i % 5 in (0, 2)), stated_first=0.2)
    assert rates.rates("new").first == pytest.approx((0.4 * 500 + 20) / (0.2 * 500 + 20), rel=0.02)


def test_released_requests_leave_nothing_but_what_they_taught_of_all():
    rates = AcceptanceRates(PRIOR)
    rates.observe("a", num_judged=1, num_accepted=0)
    rates.release("a")
    rates.release("unknown")
    assert rates.num_requests == 0
    assert rates.rates("a") == rates.rates("b") != PRIOR


@pytest.mark.parametrize(("num_judged", "num_accepted"), [(0, 0), (3, 1), (1, 2)])
def test_counts_that_cannot_be_are_refused(num_judged, num_accepted):
    with pytest.raises(AssertionError):
        AcceptanceRates(PRIOR).observe("a", num_judged=num_judged, num_accepted=num_accepted)


def test_confidences_of_a_draft_are_its_first_and_its_later_rates():
    assert Rates(0.5, 0.25).confidences(3) == [0.5, 0.25, 0.25]
    assert Rates(0.5, 0.25).confidences(1) == [0.5]
    assert Rates(0.5, 0.25).confidences(0) == []
    assert Rates(1.5, 1.25).confidences(2) == [1.0, 1.0]


def test_rates_of_all_requests_are_exported_and_restored():
    rates, restored = AcceptanceRates(PRIOR), AcceptanceRates(PRIOR)
    rates.observe("a", num_judged=3, num_accepted=2)
    assert rates.export() == {"first": [1.0, 1.0], "later": [1.0, 2.0]}
    restored.restore(json.loads(json.dumps(rates.export())))
    assert restored.rates("a") == restored.rates("b") == rates.rates("b")


@pytest.mark.parametrize(
    "state", [None, [], {"first": [1, 1]}, {"first": [1, 1], "later": [1]}, {"first": [1, 1], "later": ["1", 1]}]
)
def test_a_state_of_another_shape_is_refused_and_changes_nothing(state):
    rates = AcceptanceRates(PRIOR)
    with pytest.raises(ValueError, match="count"):
        rates.restore(state)
    assert rates.rates("a") == PRIOR
