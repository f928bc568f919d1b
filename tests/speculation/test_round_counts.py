"""What one round adds, and what sums of rounds say."""

from __future__ import annotations

import pytest

from dspark.speculation.round_counts import RoundCounts


def counts_of(*rounds: tuple[int, int, int]) -> RoundCounts:
    counts = RoundCounts(num_texts=1)
    for proposed, accepted, emitted in rounds:
        counts.add_round(num_proposed=proposed, num_accepted=accepted, num_emitted=emitted)
    return counts


def test_a_rejected_proposal_was_judged_and_those_behind_it_were_not():
    counts = counts_of((4, 1, 2))
    assert counts.reached == [1, 1, 0, 0]
    assert counts.accepted == [1, 0, 0, 0]
    assert counts.accepted_length == 2


def test_a_round_without_a_proposal_counts_with_length_one():
    counts = counts_of((2, 2, 3), (0, 0, 1))
    assert counts.accepted_length == 2
    assert counts.survival == [0.5, 0.5]
    assert counts.conditional_acceptance == [1, 1]


def test_proposals_behind_the_end_of_a_text_are_not_judged():
    """L1: the third of four accepted tokens ended the text."""
    assert counts_of((4, 4, 3)).reached == [1, 1, 1, 0]
    assert counts_of((4, 4, 3)).accepted == [1, 1, 1, 0]


def test_a_short_draft_that_was_right_judges_no_further_position():
    counts = counts_of((1, 1, 2), (3, 0, 1))
    assert counts.reached == [2, 0, 0]
    assert counts.conditional_acceptance == [0.5, None, None]


def test_what_was_not_checked_is_in_no_denominator():
    """L3: accepts 3, 1, 0 of 3, 3, 1 checked."""
    assert counts_of((3, 3, 4), (3, 1, 2), (1, 0, 1)).conditional_acceptance == [2 / 3, 1 / 2, 1]


def test_no_round_has_no_length():
    assert RoundCounts().accepted_length is None
    assert RoundCounts().to_json()["accepted_length"] is None


def test_counts_of_drafts_of_different_lengths_add_up():
    both = counts_of((1, 1, 2)).plus(counts_of((3, 2, 3)))
    assert (both.num_texts, both.num_rounds, both.num_emitted) == (2, 2, 5)
    assert both.reached == [2, 1, 1]
    assert both.accepted == [2, 1, 0]


def test_json_holds_counts_and_figures():
    assert counts_of((2, 1, 2), (2, 1, 2), (2, 0, 1)).to_json() == {
        "num_texts": 1,
        "num_rounds": 3,
        "num_emitted": 5,
        "accepted_length": 1.666667,
        "conditional_acceptance": [0.666667, 0.0],
        "survival": [0.666667, 0.0],
        "reached": [3, 2],
        "accepted": [2, 0],
    }


def test_a_round_cannot_emit_more_than_it_accepted_and_one():
    with pytest.raises(AssertionError):
        counts_of((2, 1, 3))
