"""Running rates by position: what a draft teaches, what its statement stands for, how soon a change is seen."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dspark.speculation.acceptance_rates import Rates
from dspark.speculation.position_rates import PositionRates

PRIOR = Rates(first=0.5, later=0.25)
NOTHING_SEEN = [0.5, 0.25, 0.25, 0.25]


def test_nothing_seen_is_the_prior():
    rates = PositionRates(PRIOR)
    assert rates.confidences("a", 4) == NOTHING_SEEN
    assert rates.confidences("a", 0) == []


def test_each_position_that_was_reached_counts_for_itself():
    """Of five verified the third was wrong: the fourth and fifth say nothing."""
    rates = PositionRates(PRIOR)
    rates.observe("a", num_verified=5, num_accepted=2)
    overall = [(1 + 20 * 0.5) / 21, (1 + 20 * 0.25) / 21, 20 * 0.25 / 21, 0.25]
    assert rates.confidences("b", 4) == pytest.approx(overall)
    own = [(1 + 4 * overall[0]) / 5, (1 + 4 * overall[1]) / 5, 4 * overall[2] / 5, 0.25]
    assert rates.confidences("a", 4) == pytest.approx(own)
    assert rates.confidences("a", 2) == pytest.approx(own[:2])


def test_a_draft_that_was_accepted_and_trimmed_counts_on_as_it_was_stated():
    """Two of four were verified and accepted; the third was stated as 0.8, the fourth as 0.5."""
    rates = PositionRates(PRIOR)
    rates.note_stated("a", num_tokens=7, confidences=[0.9, 0.9, 0.8, 0.5])
    rates.observe("a", num_verified=2, num_accepted=2)
    overall = [11 / 21, 6 / 21, (0.8 + 5) / 21, (0.4 + 5) / 20.8]
    assert rates.confidences("b", 4) == pytest.approx(overall)


def test_a_rejected_draft_does_not_count_as_it_was_stated():
    rates, plain = PositionRates(PRIOR), PositionRates(PRIOR)
    rates.note_stated("a", num_tokens=7, confidences=[0.9, 0.9, 0.8, 0.5])
    for each in (rates, plain):
        each.observe("a", num_verified=2, num_accepted=1)
    assert rates.confidences("b", 4) == plain.confidences("b", 4)


@pytest.mark.parametrize("num_tokens", [7, 6, 0])
def test_a_statement_never_counts_before_its_text_went_on(num_tokens):
    """The draft was dropped: made again with the same noise, it has the same tokens."""
    rates = PositionRates(PRIOR)
    rates.note_stated("a", num_tokens=7, confidences=[0.9, 0.1])
    assert rates.confidences("a", 4) == rates.confidences("b", 4) == NOTHING_SEEN
    rates.settle("a", num_tokens)
    rates.settle("a", 8)
    assert rates.confidences("a", 4) == rates.confidences("b", 4) == NOTHING_SEEN


def test_a_draft_of_which_nothing_was_verified_counts_once_as_it_was_stated():
    rates = PositionRates(PRIOR)
    rates.note_stated("a", num_tokens=7, confidences=[0.1, 0.5])
    rates.settle("a", 8)
    rates.settle("a", 9)
    assert rates.confidences("b", 3) == pytest.approx([(0.1 + 10) / 21, (0.05 + 5) / 20.1, 0.25])


def test_the_latest_statement_of_a_request_replaces_the_one_before():
    rates = PositionRates(PRIOR)
    rates.note_stated("a", num_tokens=7, confidences=[1.0])
    rates.note_stated("a", num_tokens=7, confidences=[0.0, 0.9])
    rates.settle("a", 8)
    assert rates.confidences("b", 2) == pytest.approx([10 / 21, 0.25])


@pytest.mark.parametrize("stated", [float("nan"), -1.0, 0.0])
def test_a_statement_that_is_no_number_counts_as_zero(stated):
    """Case J10."""
    rates = PositionRates(PRIOR)
    rates.note_stated("a", num_tokens=7, confidences=[stated, 0.9])
    rates.settle("a", 8)
    assert rates.confidences("b", 2) == pytest.approx([10 / 21, 0.25])


def test_a_statement_above_one_counts_as_one():
    rates = PositionRates(PRIOR)
    rates.note_stated("a", num_tokens=7, confidences=[float("inf")])
    rates.settle("a", 8)
    assert rates.confidences("b", 1) == pytest.approx([11 / 21])


def test_a_drafter_that_states_what_is_true_is_forecast_right_however_little_is_verified():
    """Verified only where 0.6 or more survives: counting verified tokens alone would give 0.8 for the first."""
    generator = np.random.default_rng(0)
    rates, verified_alone = PositionRates(PRIOR), PositionRates(PRIOR)
    seen = []
    for i in range(4000):
        c = float(generator.choice([0.8, 0.2]))
        rates.note_stated("a", num_tokens=i, confidences=[c])
        if c > 0.6:
            num_accepted = int(generator.random() < c)
            rates.observe("a", num_verified=1, num_accepted=num_accepted)
            verified_alone.observe("a", num_verified=1, num_accepted=num_accepted)
        rates.settle("a", i + 1)
        seen.append((rates.confidences("new", 1)[0], verified_alone.confidences("new", 1)[0]))
    unbiased, biased = np.mean(seen[1000:], axis=0)
    assert unbiased == pytest.approx(0.5, abs=0.02)
    assert biased > 0.7


def test_a_request_that_changes_is_seen_to_change_within_ten_drafts():
    """Both ways, after a hundred drafts of the other kind; another request hardly notices."""
    rates = PositionRates(PRIOR)
    for _ in range(100):
        rates.observe("a", num_verified=4, num_accepted=4)
        rates.observe("b", num_verified=4, num_accepted=0)
    assert min(rates.confidences("a", 4)) > 0.8
    assert rates.confidences("b", 4)[0] < 0.2
    for _ in range(10):
        rates.observe("a", num_verified=4, num_accepted=0)
    assert rates.confidences("a", 4)[0] < 0.4
    for _ in range(10):
        rates.observe("b", num_verified=4, num_accepted=4)
    assert min(rates.confidences("b", 4)) > 0.6


def test_a_position_that_is_rarely_reached_keeps_what_was_seen_there():
    """Rates of all requests forget by what was seen of a position, not by time."""
    rates = PositionRates(PRIOR)
    for _ in range(200):
        rates.observe("a", num_verified=3, num_accepted=3)
    before = rates.confidences("new", 3)
    for _ in range(200):
        rates.observe("a", num_verified=1, num_accepted=0)
    after = rates.confidences("new", 3)
    assert after[0] < 0.3
    assert after[1:] == before[1:]


def test_rates_stay_probabilities_after_any_history():
    generator = np.random.default_rng(1)
    rates = PositionRates(Rates(first=1.0, later=1.0))
    for i in range(2000):
        request_id = "abc"[int(generator.integers(3))]
        rates.note_stated(request_id, num_tokens=i, confidences=generator.random(5).tolist())
        if num_verified := int(generator.integers(0, 6)):
            num_accepted = num_verified if generator.random() < 0.9 else int(generator.integers(0, num_verified))
            rates.observe(request_id, num_verified=num_verified, num_accepted=num_accepted)
        rates.settle(request_id, i + 1)
        assert all(0.0 <= c <= 1.0 for c in rates.confidences(request_id, 7))


def test_a_released_request_leaves_nothing_but_what_it_taught_of_all():
    """Case J9: neither its rates nor an open statement pass to a new request of its id."""
    rates = PositionRates(PRIOR)
    for _ in range(50):
        rates.observe("a", num_verified=2, num_accepted=2)
    rates.note_stated("a", num_tokens=7, confidences=[0.0])
    rates.note_stated("b", num_tokens=7, confidences=[0.0])
    assert rates.num_requests == 2
    for request_id in ("a", "b", "unknown"):
        rates.release(request_id)
    assert rates.num_requests == 0
    rates.settle("a", 99)
    assert rates.confidences("a", 4) == rates.confidences("new", 4)
    assert rates.confidences("a", 4)[0] > 0.6


def test_rates_of_all_requests_are_exported_and_restored():
    rates, restored = PositionRates(PRIOR), PositionRates(PRIOR)
    rates.observe("a", num_verified=3, num_accepted=1)
    rates.note_stated("b", num_tokens=7, confidences=[0.0])
    assert rates.export() == [[1.0, 1.0], [0.0, 1.0]]
    restored.confidences("a", 4)
    restored.restore(json.loads(json.dumps(rates.export())))
    assert restored.confidences("a", 4) == restored.confidences("new", 4) == rates.confidences("new", 4)
    assert restored.num_requests == 0


@pytest.mark.parametrize("state", [None, {}, [1.0], [[1.0]], [[2.0, 1.0]], [[0.0, float("inf")]], [["0", 1.0]]])
def test_a_state_of_another_shape_is_refused_and_changes_nothing(state):
    rates = PositionRates(PRIOR)
    with pytest.raises(ValueError, match=r"count|tokens"):
        rates.restore(state)
    assert rates.confidences("a", 4) == NOTHING_SEEN


@pytest.mark.parametrize(("num_verified", "num_accepted"), [(0, 0), (1, 2), (2, -1)])
def test_counts_that_cannot_be_are_refused(num_verified, num_accepted):
    with pytest.raises(AssertionError):
        PositionRates(PRIOR).observe("a", num_verified=num_verified, num_accepted=num_accepted)
