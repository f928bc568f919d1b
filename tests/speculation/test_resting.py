"""Rests from planning: when they begin, how long they are, what ends them."""

from __future__ import annotations

from dspark.speculation.resting import FIRST_REST_ROUNDS, LOOK_ROUNDS, MAX_REST_S, Resting


def rounds_until_look(resting: Resting, num_requests: int = 16) -> int:
    num_rounds = 0
    while resting.rests(num_requests):
        num_rounds += 1
    return num_rounds


def look(resting: Resting, gain: float, *, round_s: float = 0.01) -> None:
    for _ in range(LOOK_ROUNDS):
        assert not resting.rests(16)
        resting.observe(gain, 16, round_s)


def test_there_is_no_rest_where_drafts_gain_enough():
    resting = Resting()
    for _ in range(20):
        look(resting, 0.05)


def test_rests_double_while_looks_find_little_up_to_a_second():
    resting, rests = Resting(), []
    for _ in range(6):
        look(resting, 0.03)
        rests.append(rounds_until_look(resting))
    assert rests == [FIRST_REST_ROUNDS, 16, 32, 64, 100, 100]
    assert MAX_REST_S == 1.0


def test_one_good_round_among_four_is_not_missed():
    resting = Resting()
    for gain in (0.0, 0.0, 0.2, 0.0):
        resting.observe(gain, 16, 0.01)
    assert rounds_until_look(resting) == 0


def test_a_look_that_pays_makes_the_next_rest_short_again():
    resting = Resting()
    for gain in (0.0, 0.0, 0.1, 0.0):
        look(resting, gain)
        num_rounds = rounds_until_look(resting)
    assert num_rounds == FIRST_REST_ROUNDS


def test_a_rest_ends_when_the_load_changes():
    resting = Resting()
    look(resting, 0.0)
    assert resting.rests(16) and resting.rests(11)
    assert not resting.rests(10)
    look(resting, 0.0)
    assert not resting.rests(25)
