"""Who starts when, what shares a step, and what that does to the pace: the scheduler alone on a simulated clock."""

from __future__ import annotations

import random

import numpy as np
import pytest
from simulated_steps import SimulatedSteps

from dspark.config import BatchingConfig
from dspark.engine.scheduler import verify_all
from dspark.speculation.planner import Load
from dspark.speculation.proposal import NO_DRAFT, Draft

# Seconds of a step over so many tokens, as measured on two cores with the embedded model.
MEASURED_TOKENS = (1, 2, 4, 8, 9, 16, 17, 32, 64, 128, 256)
MEASURED_S = (0.031, 0.034, 0.038, 0.048, 0.055, 0.066, 0.075, 0.1, 0.17, 0.33, 0.65)


def measured(num_tokens: int, context_len: float = 0.0) -> float:
    return float(np.interp(num_tokens, MEASURED_TOKENS, MEASURED_S))


# -- arrivals ------------------------------------------------------------------------------------------------------


def test_a_lone_request_starts_at_once():
    steps = SimulatedSteps()
    steps.add("a", 5)
    assert steps.scheduler.wait_s == 0.0
    assert [row.num_tokens for row in steps.step()] == [5]


def test_requests_wait_for_a_minimum_and_then_start_together():
    """The wait is counted from the oldest; a caller may sleep through what is left of it."""
    steps = SimulatedSteps(BatchingConfig(min_size=3, max_wait_time="10ms"))
    steps.add("a", 5)
    assert not steps.step()
    assert steps.scheduler.wait_s == pytest.approx(0.010)
    steps.now += 0.004
    steps.add("b", 5)
    assert not steps.step()
    assert steps.scheduler.wait_s == pytest.approx(0.006)
    steps.now += 0.004
    steps.add("c", 5)
    assert steps.scheduler.wait_s == 0.0
    assert len(steps.step()) == 3


def test_nobody_waits_for_a_minimum_longer_than_allowed():
    steps = SimulatedSteps(BatchingConfig(min_size=3, max_wait_time="10ms"))
    steps.add("a", 5)
    steps.now += steps.scheduler.wait_s
    steps.now += 1e-9  # sums of seconds round
    assert steps.scheduler.wait_s == 0.0
    assert len(steps.step()) == 1


def test_running_requests_never_wait_for_others():
    steps = SimulatedSteps(BatchingConfig(min_size=3, max_wait_time="10ms"), seconds=lambda num_tokens: 0.004)
    steps.add("a", 5, arrival_time=steps.now - 1)
    steps.step()
    steps.add("b", 5)
    in_steps = []
    for _ in range(4):
        assert steps.scheduler.wait_s == 0.0
        in_steps.append([row.sequence.request_id for row in steps.step()])
    assert in_steps == [["a"], ["a"], ["a"], ["a", "b"]]  # at 0, 4, 8 and 12 ms


def test_a_request_that_seems_to_come_from_the_future_starts_at_once():
    steps = SimulatedSteps(BatchingConfig(min_size=3))
    steps.add("a", 5, arrival_time=1e9)
    assert len(steps.step()) == 1


def test_larger_arrivals_are_split_and_keep_their_order():
    steps = SimulatedSteps(BatchingConfig(max_size=4))
    names = [f"r{i}" for i in range(10)]
    for name in names:
        steps.add(name, 5)
    steps.step()
    assert (steps.running, steps.waiting) == (names[:4], names[4:])
    steps.drain()
    assert steps.started == names


def test_an_automatic_size_fills_the_token_budget():
    steps = SimulatedSteps(BatchingConfig(max_batch_tokens=16))
    for i in range(40):
        steps.add(str(i), 1)
    for _ in range(3):
        assert [row.num_tokens for row in steps.step()] == [1] * 16
    steps.drain()


def test_an_automatic_size_fills_the_pages():
    steps = SimulatedSteps(num_pages=10, page_size=4)
    for i in range(8):
        steps.add(str(i), 7, 1)
    assert len(steps.step()) == 5
    steps.drain()


# -- fairness ------------------------------------------------------------------------------------------------------


def test_a_request_that_does_not_fit_is_not_passed_by_smaller_ones():
    steps = SimulatedSteps(num_pages=10, page_size=4)
    steps.add("first", 20, 4)
    steps.step()
    steps.add("large", 32, 2)
    for i in range(5):
        steps.add(f"small{i}", 2, 2)
    steps.step()
    assert steps.running == ["first"]
    steps.drain()
    assert steps.started[:2] == ["first", "large"]


def test_a_request_that_was_sent_back_starts_before_those_that_came_later():
    steps = SimulatedSteps(BatchingConfig(max_size=3), num_pages=9, page_size=2)
    for name in "abc":
        steps.add(name, 2, 9)
    steps.add("d", 1, 1)
    while not steps.num_preempted:
        steps.step()
    assert steps.waiting == ["c", "d"]
    num_said = len(steps.token_times["c"])
    steps.drain()
    assert steps.token_times["c"][num_said] <= steps.token_times["d"][0]


def test_drafts_go_on_while_a_request_waits_that_would_not_fit_without_them():
    steps = SimulatedSteps(num_pages=16, page_size=1, num_draft_tokens=4)
    steps.add("a", 2, 9)
    steps.step()
    steps.add("large", 14, 1)
    (row,) = steps.step()
    assert len(row.draft.token_ids) == 4


def test_drafts_give_way_to_a_request_that_fits_without_them():
    steps = SimulatedSteps(num_pages=16, page_size=1, num_draft_tokens=4)
    steps.add("a", 2, 9)
    steps.step()
    steps.add("b", 13, 1)
    assert [len(row.draft.token_ids) for row in steps.step()] == [0, 0]


def test_a_request_that_fills_the_pool_needs_no_room_for_drafts():
    """D12: the reserve for drafts is no part of anybody's limit."""
    steps = SimulatedSteps(num_pages=8, page_size=4, num_draft_tokens=7, num_accepted=7)
    steps.add("a", 24, 8)
    steps.drain()
    assert len(steps.token_times["a"]) == 8
    assert not steps.num_preempted


# -- verified lengths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafted", "room", "lengths"),
    [
        ([3, 1], 9, [3, 1]),
        ([5, 5, 1], 7, [3, 3, 1]),
        ([7, 2], 5, [3, 2]),
        ([4, 4], 1, [1, 0]),
        ([2], 0, [0]),
        ([0, 0], 3, [0, 0]),
    ],
)
def test_whole_drafts_share_short_room_evenly(drafted, room, lengths):
    steps = SimulatedSteps()
    decoding = []
    for i, length in enumerate(drafted):
        decoding.append(steps.add(str(i), 5))
        decoding[-1].draft = Draft(token_ids=[0] * length)
    load = Load(num_decoding=len(drafted), num_prefill_tokens=6, max_tokens=room + 6 + len(drafted), context_len=1.0)
    assert verify_all(decoding, load) == lengths


def test_lengths_are_planned_with_all_that_the_step_holds():
    loads = []

    def plan(decoding, load):
        loads.append(load)
        return [1] * len(decoding)

    steps = SimulatedSteps(BatchingConfig(max_batch_tokens=32), num_draft_tokens=3, plan_lengths=plan)
    steps.add("a", 10)
    steps.step()
    assert not loads  # nobody decodes yet
    steps.add("b", 4)
    steps.add("c", 90)
    steps.step()
    # The anchor stands after 10 tokens, b fills a chunk of 4 and c gets what drafts of 3 leave of the budget.
    context = 10 + (0 + 1 + 2 + 3) + sum(range(24))
    load = Load(num_decoding=1, num_prefill_tokens=28, max_tokens=32, context_len=context / 29)
    assert loads == [load]


def test_what_the_next_step_will_hold_is_known_when_drafts_are_made():
    """Of 31 tokens 16 go to prefill if drafts want all: 3 of who runs, then who has a place."""
    steps = SimulatedSteps(BatchingConfig(max_batch_tokens=32, max_size=3))
    steps.add("a", 10)
    steps.step()
    steps.add("b", 34)
    steps.step()
    for name in "cd":
        steps.add(name, 5)
    context = 11 + sum(range(31, 34)) + sum(range(5))
    assert steps.scheduler.coming_load() == Load(
        num_decoding=1, num_prefill_tokens=8, max_tokens=32, context_len=context / 9
    )
    steps.add("e", 5)
    assert [row.num_tokens for row in steps.step()] == [1, 3, 5]


def test_prefill_to_come_leaves_room_for_drafts():
    steps = SimulatedSteps(BatchingConfig(max_batch_tokens=32))
    steps.add("a", 10)
    steps.step()
    steps.add("b", 500)
    assert steps.scheduler.coming_load().room == 15


def test_each_request_verifies_the_length_planned_for_it():
    """J9, H15: lengths go by request, whoever left or joined between steps."""
    wanted = {"a": 0, "b": 3, "c": 1, "d": 2}

    def plan(decoding, load):
        return [min(wanted[s.request_id], len(s.draft.token_ids)) for s in decoding]

    steps = SimulatedSteps(num_draft_tokens=3, plan_lengths=plan)
    steps.add("a", 3, 3)
    steps.add("b", 3, 9)
    steps.add("c", 3, 5)
    verified = []
    for number in range(6):
        verified.append({r.sequence.request_id: len(r.draft.token_ids) for r in steps.step()})
        if number == 2:  # a has left, d takes its place
            steps.add("d", 3, 9)
    assert verified[1] == {"a": 0, "b": 3, "c": 1}
    assert verified[4] == {"b": 3, "c": 0, "d": 2}  # c has one token left
    assert verified[5] == {"b": 3, "d": 2}


@pytest.mark.parametrize("lengths", [[5], [-1], [1, 1], []])
def test_a_plan_that_does_not_fit_the_drafts_is_an_error(lengths):
    steps = SimulatedSteps(num_draft_tokens=4, plan_lengths=lambda decoding, load: lengths)
    steps.add("a", 3)
    steps.step()
    with pytest.raises(AssertionError):
        steps.step()


def test_drafts_and_prefill_share_the_budget_by_halves():
    steps = SimulatedSteps(BatchingConfig(max_batch_tokens=32), num_draft_tokens=20)
    steps.add("a", 1, 100)
    steps.step()
    steps.add("b", 100)
    first, second = steps.step()
    assert (len(first.draft.token_ids), second.num_tokens) == (15, 16)
    steps.num_draft_tokens = 2
    steps.step()
    first, second = steps.step()
    assert (len(first.draft.token_ids), second.num_tokens) == (2, 29)


def test_a_weak_request_gets_its_token_in_every_step():
    """J13: a planner that gives all room to easy requests cannot take the one token that a step owes."""

    def plan(decoding, load):
        room, lengths = load.room, []
        for sequence in decoding:
            lengths.append(0 if sequence.request_id == "weak" else min(len(sequence.draft.token_ids), room))
            room -= lengths[-1]
        return lengths

    steps = SimulatedSteps(
        BatchingConfig(max_batch_tokens=16), num_draft_tokens=7, num_accepted=7, plan_lengths=plan, num_pages=9000
    )
    for name in ("a", "b", "c", "weak", "d", "e", "f", "g"):
        steps.add(name, 2, 1600)
    for _ in range(4):
        steps.step()
    assert len(steps.running) == 8
    num_before = len(steps.token_times["weak"])
    for _ in range(200):
        steps.step()
    assert len(steps.token_times["weak"]) == num_before + 200


# -- prefill -------------------------------------------------------------------------------------------------------


def test_a_long_prompt_slows_those_who_decode_at_most_fourfold():
    steps = SimulatedSteps(seconds=measured, step_s=measured)
    for i in range(20):
        steps.add(str(i), 3, 200)
    steps.step()
    steps.add("long", 300)
    chunks = []
    while steps.num_tokens_left["long"] == 10:
        before = steps.now
        rows = steps.step()
        assert len(rows) == 21
        assert steps.now - before <= 4 * measured(20)
        chunks.append(rows[-1].num_tokens)
    assert chunks == [104, 104, 92]  # 124 tokens take 320 ms, 20 take 80


def test_a_long_prompt_starts_quickly_where_nobody_decodes():
    steps = SimulatedSteps(step_s=measured)
    steps.add("long", 300)
    assert [steps.step()[0].num_tokens for _ in range(2)] == [256, 44]


def test_only_the_chunk_that_ends_a_prompt_gives_a_token():
    """H13"""
    steps = SimulatedSteps(BatchingConfig(max_batch_tokens=16))
    sequence = steps.add("a", 37)
    rows = [steps.step()[0] for _ in range(3)]
    assert [row.num_tokens for row in rows] == [16, 16, 5]
    assert len(sequence.token_ids) == 38


def test_a_request_that_was_sent_back_computes_its_text_in_chunks_and_has_no_old_draft():
    """H11: the chunk border lies inside what it had said."""
    steps = SimulatedSteps(BatchingConfig(max_batch_tokens=16, max_size=2), num_pages=40, page_size=1)
    steps.allocator.prefix_caching = False
    steps.add("a", 4, 30)
    sequence = steps.add("b", 12, 18)
    while sequence in steps.scheduler.running or not steps.token_times["b"]:
        steps.step()
    num_said = len(steps.token_times["b"])
    assert (sequence.draft, sequence.num_computed, num_said) == (NO_DRAFT, 0, 13)
    while sequence not in steps.scheduler.running:
        steps.step()
    assert 12 < sequence.num_computed < 12 + num_said
    assert len(steps.token_times["b"]) == num_said
    steps.drain()
    assert len(steps.token_times["b"]) == 18


# -- the target time per token -------------------------------------------------------------------------------------


def test_a_target_time_per_token_queues_what_would_break_it():
    steps = SimulatedSteps(
        BatchingConfig(target_tpot_ms=45), seconds=lambda n: 0.01 * n, step_s=lambda n, context_len: 0.01 * n
    )
    names = [f"r{i}" for i in range(12)]
    for i, name in enumerate(names):
        steps.add(name, 1, 20 + i)
    steps.step()
    assert (steps.running, steps.waiting) == (names[:4], names[4:])
    steps.drain()
    assert steps.started == names
    for times in steps.token_times.values():
        assert (times[-1] - times[0]) / (len(times) - 1) <= 0.045


def test_a_target_that_nothing_meets_serves_one_after_the_other():
    steps = SimulatedSteps(BatchingConfig(target_tpot_ms=0.5), step_s=lambda n, context_len: 0.01 * n)
    for i in range(3):
        steps.add(str(i), 1, 3)
    while steps.scheduler.running or steps.scheduler.waiting:
        assert len(steps.step()) == 1


def test_drafts_that_are_accepted_let_more_run():
    """Steps of flat cost give four tokens instead of one: what they hold may take four times as long."""
    batching = BatchingConfig(target_tpot_ms=45.2)

    def step_s(num_tokens, context_len):
        return 0.04 + 0.0005 * num_tokens

    running = []
    for num_drafts in (0, 3):
        steps = SimulatedSteps(
            batching, num_draft_tokens=num_drafts, num_accepted=num_drafts, step_s=step_s,
            tokens_per_step=lambda num_drafts=num_drafts: 1.0 + num_drafts,
        )  # fmt: skip
        for i in range(100):
            steps.add(str(i), 1, 400)
        for _ in range(60):
            steps.step()
        running.append(len(steps.running))
    assert running == [10, 70]  # 40 + 0.5 * 10 = 45 and 40 + 0.5 * 4 * 70 = 4 * 45, one more is too many


# -- bursts and drains ---------------------------------------------------------------------------------------------


def test_a_batch_drains_to_nothing_and_the_next_request_starts_at_once():
    """J8: requests of 1 to 33 tokens end one after the other; no step is empty."""
    steps = SimulatedSteps(num_draft_tokens=7, num_accepted=2)
    for i in range(1, 34):
        steps.add(str(i), 3, i)
    steps.drain()
    assert [len(steps.token_times[str(i)]) for i in range(1, 34)] == list(range(1, 34))
    steps.add("last", 3, 5)
    assert len(steps.step()) == 1
    steps.drain()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_no_page_is_lost_when_requests_end_anywhere(page_size):
    """H7: limits and aborts at random places, under pressure of pages."""
    draws = random.Random(page_size)
    steps = SimulatedSteps(num_pages=256 // page_size, page_size=page_size, num_draft_tokens=7, num_accepted=3)
    for i in range(200):
        steps.add(str(i), draws.randint(1, 40), draws.randint(1, 40))
        if draws.random() < 0.5:
            steps.step()
        if draws.random() < 0.1:
            steps.scheduler.remove(draws.choice(list(steps.scheduler)))
    assert steps.num_preempted
    steps.drain()


def test_throughput_has_no_cliff_at_odd_numbers_of_requests():
    """J12: sizes are reckoned in tokens, so no number of requests does much worse than its neighbours."""

    def throughput(num_requests, num_drafts):
        steps = SimulatedSteps(seconds=measured, step_s=measured, num_draft_tokens=num_drafts, num_accepted=num_drafts)
        for i in range(num_requests):
            steps.add(str(i), 8, 200)
        for _ in range(4):
            steps.step()
        start, num_before = steps.now, sum(map(len, steps.token_times.values()))
        for _ in range(10):
            steps.step()
        return (sum(map(len, steps.token_times.values())) - num_before) / (steps.now - start)

    for num_drafts in range(8):
        rates = [throughput(n, num_drafts) for n in range(1, 21)]
        for below, rate, above in zip(rates, rates[1:], rates[2:], strict=False):
            assert rate >= 0.7 * (below + above) / 2, (num_drafts, rates)
