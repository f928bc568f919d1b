"""How much prefill a step carries beside running requests, and how many requests a target time per token lets run."""

from __future__ import annotations

import pytest

from dspark.engine.pace import MIN_PREFILL_TOKENS, Pace, StepSize


def one() -> float:
    return 1.0


def by_tokens(num_tokens: int, context_len: float) -> float:
    return 0.020 + 0.001 * num_tokens


def anchors(num_decoding: int, context_len: int = 100) -> StepSize:
    return StepSize().plus((context_len, 1) for _ in range(num_decoding))


def test_a_size_counts_the_text_before_each_token():
    size = StepSize().plus([(10, 1), (4, 3)])
    assert size == StepSize(4, 10 + 4 + 5 + 6)
    assert size.context_len == 6.25
    assert StepSize().context_len == 0.0


def test_a_size_takes_no_more_than_it_is_given_room_for():
    assert StepSize().plus([(10, 2), (4, 3)], 3) == StepSize(3, 10 + 11 + 4)


def test_prefill_takes_a_step_to_four_times_its_time():
    """Ten anchors take 30 ms; just below 120 ms are 99 tokens."""
    assert Pace(by_tokens, tokens_per_step=one).max_prefill_tokens(anchors(10), [(0, 500)], 200) == 89


def test_prefill_has_all_room_when_nobody_decodes_or_nothing_is_known():
    assert Pace(by_tokens, tokens_per_step=one).max_prefill_tokens(anchors(0), [(0, 500)], 200) == 200
    assert Pace(None, tokens_per_step=one).max_prefill_tokens(anchors(10), [(0, 500)], 200) == 200


def test_prefill_goes_on_where_even_little_of_it_is_slow():
    pace = Pace(lambda num_tokens, context_len: 1.0 * num_tokens, tokens_per_step=one)
    assert pace.max_prefill_tokens(anchors(1), [(0, 500)], 200) == MIN_PREFILL_TOKENS
    assert pace.max_prefill_tokens(anchors(1), [(0, 500)], 9) == 9


def test_steps_that_cost_the_same_whatever_they_hold_are_filled():
    pace = Pace(lambda num_tokens, context_len: 0.03, tokens_per_step=one)
    assert pace.max_prefill_tokens(anchors(1), [(0, 500)], 255) == 255


def test_chunks_deep_in_a_long_prompt_are_smaller():
    """The step's time follows the text before its tokens, and whose turn it is decides which text that is."""
    pace = Pace(lambda n, context_len: 0.02 + 0.001 * n + 1e-5 * n * context_len, tokens_per_step=one)
    at_start = pace.max_prefill_tokens(anchors(10), [(0, 500), (4000, 500)], 200)
    deep = pace.max_prefill_tokens(anchors(10), [(1500, 500), (0, 500)], 200)
    assert at_start > 30 > MIN_PREFILL_TOKENS
    assert deep == MIN_PREFILL_TOKENS


def test_prefill_respects_the_target_time_per_token():
    """50 ms for a token, of which a step gives two: at first 50, then 100 ms."""
    assert Pace(by_tokens, tokens_per_step=one, target_tpot_s=0.05).max_prefill_tokens(
        anchors(10), [(0, 500)], 200
    ) == pytest.approx(20)
    pace = Pace(by_tokens, tokens_per_step=lambda: 2.0, target_tpot_s=0.05)
    assert pace.max_prefill_tokens(anchors(10), [(0, 500)], 200) == 70


def test_requests_run_while_each_keeps_the_target():
    pace = Pace(lambda num_tokens, context_len: 0.01 * num_tokens, tokens_per_step=one, target_tpot_s=0.045)
    assert [pace.has_room_for([100] * n) for n in (1, 4, 5)] == [True, True, False]


def test_longer_texts_leave_room_for_fewer():
    pace = Pace(lambda n, context_len: 1e-4 * n * context_len, tokens_per_step=one, target_tpot_s=0.045)
    assert pace.has_room_for([100] * 4)
    assert not pace.has_room_for([100, 100, 100, 200])


def test_one_request_runs_whatever_the_target():
    pace = Pace(lambda num_tokens, context_len: 9.9, tokens_per_step=one, target_tpot_s=0.001)
    assert pace.has_room_for([100])
    assert not pace.has_room_for([100, 100])


def test_drafted_tokens_count_in_the_step_and_in_what_it_gives():
    """Each request verifies three tokens a step and gets two: n requests take 40n ms for two tokens each."""
    pace = Pace(lambda num_tokens, context_len: 0.01 * num_tokens, tokens_per_step=lambda: 2.0, target_tpot_s=0.045)
    assert [pace.has_room_for([100] * n) for n in (4, 5)] == [True, False]  # at least what they get is verified
    for _ in range(200):
        pace.observe(2, 6)
    assert [pace.has_room_for([100] * n) for n in (2, 3)] == [True, False]


def test_an_observation_of_nothing_still_means_a_token_a_step():
    pace = Pace(lambda num_tokens, context_len: 0.01 * num_tokens, tokens_per_step=lambda: 0.0, target_tpot_s=0.045)
    assert pace.has_room_for([100] * 4)


def test_without_a_target_everybody_runs():
    assert Pace(None, tokens_per_step=one).has_room_for([100] * 1000)


def test_a_target_needs_predictions():
    with pytest.raises(AssertionError, match="predicted step times"):
        Pace(None, tokens_per_step=one, target_tpot_s=0.05)
