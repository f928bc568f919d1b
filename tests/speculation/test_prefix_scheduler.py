"""Verified lengths: the published algorithm to the letter, its variant for jagged costs, and what must always hold."""

from __future__ import annotations

import copy
import dataclasses
import heapq
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from dspark.speculation.prefix_scheduler import (
    DelayedScheduler,
    DraftedStep,
    EarlyStopScheduler,
    FixedScheduler,
    ForesightScheduler,
    SurvivalTable,
    ThresholdScheduler,
    survivals_of,
    throughput,
)

FIXTURE = Path(__file__).parents[1] / "fixtures" / "algorithms" / "prefix_scheduler.json"
INSTANCES = json.loads(FIXTURE.read_text())["instances"]
SCHEDULERS = {
    "early_stop": EarlyStopScheduler,
    "foresight": ForesightScheduler,
    "delayed": DelayedScheduler,
    "threshold": lambda: ThresholdScheduler(0.4),
    "fixed": lambda: FixedScheduler(2),
}
J1 = [survivals_of(c) for c in ([0.9, 0.89, 0.88], [0.6, 0.5, 0.3])]  # case J1 and J2


def step_of(survivals, seconds, *, num_other_tokens=None, max_tokens=10**6, fixed_s=0.0) -> DraftedStep:
    """Return a step whose pass over B tokens takes `seconds(B)`."""
    return DraftedStep(
        survivals=survivals,
        num_other_tokens=len(survivals) if num_other_tokens is None else num_other_tokens,
        max_tokens=max_tokens,
        step_s=lambda num_tokens: np.array([float(seconds(int(b))) for b in num_tokens]),
        fixed_s=fixed_s,
    )


def flat(num_tokens: int) -> float:
    return 1.0


def staircase(num_tokens: int) -> float:
    """Case J2."""
    return 1.0 if num_tokens <= 2 else 1 / 0.6 if num_tokens <= 5 else 1 / 0.4


def golden_step(instance) -> DraftedStep:
    return step_of([survivals_of(c) for c in instance["confidences"]], lambda b: 1.0 / instance["sps"][b])


def delayed_lengths(earlier: DraftedStep, present: DraftedStep) -> list[int]:
    """Return the lengths of a step two steps after one with the drafts of `earlier`."""
    scheduler = DelayedScheduler()
    scheduler.lengths(earlier)
    scheduler.lengths(present)
    return scheduler.lengths(present)


def random_step(seed: int, *, num_requests=None, max_len=4, max_tokens=10**6) -> DraftedStep:
    """Return drafts of different lengths, without equal survivals, over a curve that rises and falls."""
    generator = np.random.default_rng(seed)
    num_requests = num_requests or int(generator.integers(1, 6))
    survivals = [
        survivals_of(generator.uniform(0.2, 1.0, generator.integers(0, max_len + 1))) for _ in range(num_requests)
    ]
    costs = generator.uniform(1.0, 1.6, 200) + 0.1 * np.arange(200)
    num_other_tokens = num_requests + int(generator.integers(0, 3))
    return step_of(survivals, lambda b: costs[b], num_other_tokens=num_other_tokens, max_tokens=max_tokens)


# -- Algorithm 1 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda i: f"{i['id']}-{i['curve']}")
def test_early_stop_gives_the_published_lengths(instance):
    step = golden_step(instance)
    lengths = EarlyStopScheduler().lengths(step)
    assert lengths == instance["algorithm1"]["lengths"]
    assert throughput(step, lengths) == pytest.approx(instance["algorithm1"]["theta"], rel=1e-12)


def adapted_early_stop(step: DraftedStep) -> list[int]:
    """Algorithm 1 as it would run with tokens drawn one by one: a survival is looked at once the token before it is in.

    That the fast path equals it is why the fast path may sort survivals that depend on drawn tokens.
    """
    lengths = [0] * len(step.survivals)
    known = [(-a[0], 1, r) for r, a in enumerate(step.survivals) if a and a[0] > 0.0]
    heapq.heapify(known)
    best = throughput(step, lengths)
    while known and sum(lengths) < step.max_drafted:
        _, position, r = heapq.heappop(known)
        lengths[r] += 1
        theta = throughput(step, lengths)
        if theta <= best:
            lengths[r] -= 1
            break
        best = theta
        if position < len(step.survivals[r]) and step.survivals[r][position] > 0.0:
            heapq.heappush(known, (-step.survivals[r][position], position + 1, r))
    return lengths


@pytest.mark.parametrize("seed", range(30))
def test_early_stop_needs_no_survival_behind_a_token_that_is_not_admitted(seed):
    step = random_step(seed, max_tokens=12)
    assert EarlyStopScheduler().lengths(step) == adapted_early_stop(step)


@pytest.mark.parametrize("seed", range(30))
def test_admission_of_a_token_does_not_change_with_the_confidences_behind_it(seed):
    """Whatever x_k does to a_{k+1} and later, whether x_k is verified stays: the condition for being lossless."""
    step = random_step(seed)
    before = EarlyStopScheduler().lengths(step)
    generator = np.random.default_rng(seed + 1000)
    for r, survivals in enumerate(step.survivals):
        for k in range(1, len(survivals) + 1):
            factors = generator.uniform(0.0, 1.0, len(survivals) - k)
            changed = survivals[:k] + [survivals[k - 1] * f for f in survivals_of(factors)]
            others = [changed if i == r else a for i, a in enumerate(step.survivals)]
            after = EarlyStopScheduler().lengths(
                DraftedStep(
                    survivals=others,
                    num_other_tokens=step.num_other_tokens,
                    max_tokens=step.max_tokens,
                    step_s=step.step_s,
                )
            )
            assert (before[r] >= k) == (after[r] >= k)


def prefix_vectors(step: DraftedStep):
    return itertools.product(*(range(len(a) + 1) for a in step.survivals))


@pytest.mark.parametrize("seed", range(20))
def test_early_stop_ends_at_the_first_peak_among_the_best_lengths_of_each_size(seed):
    """Brute force over all ways to admit: the best Theta of each total; the algorithm climbs until one is no higher."""
    step = random_step(seed, num_requests=3, max_len=3)
    best_of_total: dict[int, float] = {}
    for lengths in prefix_vectors(step):
        theta = throughput(step, lengths)
        best_of_total[sum(lengths)] = max(theta, best_of_total.get(sum(lengths), 0.0))
    peak = next(n for n in itertools.count() if best_of_total.get(n + 1, 0.0) <= best_of_total[n])
    chosen = EarlyStopScheduler().lengths(step)
    assert sum(chosen) == peak
    assert throughput(step, chosen) == pytest.approx(best_of_total[peak], rel=1e-12)


def test_equal_survivals_go_to_the_earlier_position_then_to_the_lower_request():
    survivals = [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    for num_free, expected in ((1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (4, [2, 1, 1])):
        step = step_of(survivals, lambda b, end=3 + num_free: 1.0 if b <= end else 10.0)
        assert EarlyStopScheduler().lengths(step) == expected


def test_a_gain_of_nothing_stops():
    step = step_of([[0.5, 0.25]], lambda b: {1: 1.0, 2: 1.5, 3: 1.5}[b])
    assert EarlyStopScheduler().lengths(step) == [0]


def test_a_flat_curve_verifies_everything():
    """Case J1."""
    assert EarlyStopScheduler().lengths(step_of(J1, flat)) == [3, 3]


def test_a_staircase_stops_early_stop_and_not_the_delayed_budget():
    """Case J2: Theta is 2, 1.74, 2.22, 2.64, 2.00, 2.12, 2.16."""
    step = step_of(J1, staircase)
    assert EarlyStopScheduler().lengths(step) == [0, 0]
    assert delayed_lengths(step, step) == [3, 0]


def test_prefill_tokens_of_the_step_move_it_along_the_curve():
    """Tokens up to the eighth are free: seven beside the anchor, one beside the anchor and six of a prefill."""
    seconds = {b: 1.0 if b <= 8 else 2.0 for b in range(1, 20)}
    assert EarlyStopScheduler().lengths(step_of([[0.9] * 9], seconds.get)) == [7]
    assert EarlyStopScheduler().lengths(step_of([[0.9] * 9], seconds.get, num_other_tokens=7)) == [1]


def test_costs_paid_anyway_make_more_tokens_worth_their_time():
    """Case J5: a pass of 1 + .9 l; .8 more tokens for .9 s more pay only where the step costs more than its pass."""
    survivals = survivals_of([0.8] * 5)
    assert EarlyStopScheduler().lengths(step_of([survivals], lambda b: 1 + 0.9 * (b - 1))) == [0]
    assert EarlyStopScheduler().lengths(step_of([survivals], lambda b: 1 + 0.9 * (b - 1), fixed_s=0.3)) == [1]
    assert EarlyStopScheduler().lengths(step_of([survivals], lambda b: 1 + 0.05 * (b - 1), fixed_s=0.3)) == [5]


def test_throughput_is_tokens_by_the_seconds_of_the_whole_step():
    step = step_of([[0.5, 0.25], [1.0]], lambda b: 0.1 * b, num_other_tokens=4, fixed_s=0.4)
    assert throughput(step, [0, 0]) == pytest.approx(2 / 0.8)
    assert throughput(step, [2, 1]) == pytest.approx(3.75 / 1.1)
    # It shows that this draft does not pay, whatever is verified of it: plain decoding makes one token a second.
    drafted = step_of([survivals_of([0.8] * 5)], lambda b: 1 + 0.9 * (b - 1), fixed_s=0.3)
    assert throughput(drafted, EarlyStopScheduler().lengths(drafted)) < 1.0


# -- the delayed variant -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda i: f"{i['id']}-{i['curve']}")
def test_with_unchanged_drafts_the_delayed_budget_is_the_unrestricted_optimum(instance):
    step = golden_step(instance)
    lengths = delayed_lengths(step, step)
    assert lengths == instance["no_break"]["lengths"]
    assert throughput(step, lengths) == pytest.approx(instance["exhaustive"]["theta"], rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_the_delayed_budget_reaches_the_best_of_all_lengths(seed):
    step = random_step(seed, num_requests=3, max_len=3)
    best = max(throughput(step, lengths) for lengths in prefix_vectors(step))
    assert throughput(step, delayed_lengths(step, step)) == pytest.approx(best, rel=1e-12)


def test_the_budget_is_that_of_two_steps_ago_and_the_ranking_is_of_now():
    """Case J9: requests may have changed places since; the confident one gets the tokens."""
    earlier = step_of(J1, staircase)  # budget 3
    swapped = step_of(J1[::-1], staircase)
    assert delayed_lengths(earlier, swapped) == [0, 3]
    hopeless = step_of([[0.1, 0.05], [0.09, 0.08, 0.07]], staircase)
    assert delayed_lengths(earlier, hopeless) == [1, 2]


def test_each_steps_budget_comes_from_the_step_two_before_it():
    scheduler = DelayedScheduler()
    jagged = step_of(J1, staircase)
    sure = step_of([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], staircase)  # 5 / (1 / .6) is 3, 8 / (1 / .4) is 3.2
    totals = [sum(scheduler.lengths(step)) for step in (jagged, sure, sure, sure, jagged, jagged, jagged)]
    assert totals == [0, 0, 3, 6, 6, 6, 3]


def test_without_a_draft_two_steps_ago_the_delayed_scheduler_is_algorithm_1():
    scheduler = DelayedScheduler()
    step = step_of(J1, flat)
    idle = step_of([[], []], flat)
    assert [scheduler.lengths(s) for s in (idle, idle, step, step, step)] == [[0, 0], [0, 0], [3, 3], [3, 3], [3, 3]]


def test_a_delayed_budget_holds_at_the_present_load():
    """The survivals are two steps old, the anchors and prefill beside them are not."""
    seconds = {b: 1.0 if b <= 8 else 20.0 for b in range(1, 40)}
    earlier = step_of([[0.9, 0.9, 0.9, 0.9]], seconds.get)
    present = step_of([[0.9, 0.9, 0.9, 0.9]] * 2, seconds.get, num_other_tokens=6)
    assert delayed_lengths(earlier, present) == [1, 1]


# -- foresight -----------------------------------------------------------------------------------------------------


def test_foresight_passes_a_drop_that_the_next_tokens_make_up_for():
    """Case J2: the next tokens survive with .9 and .6, so .9, .81, .73 and .6, .36 are hoped for: a Theta of 2.7."""
    assert ForesightScheduler().lengths(step_of(J1, staircase)) == [3, 0]
    assert ForesightScheduler().lengths(step_of([[0.3, 0.3], [0.2, 0.2]], staircase)) == [0, 0]


def test_foresight_judges_what_follows_by_the_next_token_alone():
    """The second survival is hoped for from the first, 0.95 squared; that it is far less comes out too late."""
    seconds = {1: 1.0, 2: 2.0, 3: 1.45}.get
    assert ForesightScheduler().lengths(step_of([[0.95, 0.01]], seconds)) == [2]
    assert ForesightScheduler().lengths(step_of([[0.3, 0.3]], seconds)) == [0]


@pytest.mark.parametrize("seed", range(30))
def test_foresight_is_algorithm_1_where_costs_rise_evenly(seed):
    step = random_step(seed)
    even = step_of(step.survivals, lambda b: 1.0 + 0.2 * b)
    assert ForesightScheduler().lengths(even) == EarlyStopScheduler().lengths(even)


@pytest.mark.parametrize("seed", range(30))
def test_foresight_does_not_see_what_a_token_brings_behind_it(seed):
    """As for Algorithm 1: whether x_k is verified stays, whatever the confidences behind it are."""
    step = random_step(seed)
    before = ForesightScheduler().lengths(step)
    generator = np.random.default_rng(seed + 1000)
    for r, survivals in enumerate(step.survivals):
        for k in range(1, len(survivals) + 1):
            factors = generator.uniform(0.0, 1.0, len(survivals) - k)
            changed = survivals[:k] + [survivals[k - 1] * f for f in survivals_of(factors)]
            others = [changed if i == r else a for i, a in enumerate(step.survivals)]
            after = ForesightScheduler().lengths(dataclasses.replace(step, survivals=others))
            assert (before[r] >= k) == (after[r] >= k)


# -- threshold and fixed -------------------------------------------------------------------------------------------


def test_the_threshold_is_on_the_product_of_confidences():
    """Case J4: c = (.2, .99, .99) has no likely token behind its hopeless first."""
    survivals = [survivals_of([0.2, 0.99, 0.99]), survivals_of([0.9, 0.8, 0.9])]
    assert ThresholdScheduler(0.5).lengths(step_of(survivals, flat)) == [0, 3]
    assert ThresholdScheduler(0.7).lengths(step_of(survivals, flat)) == [0, 2]
    assert ThresholdScheduler(0.0).lengths(step_of(survivals, flat)) == [3, 3]
    assert ThresholdScheduler(1.0).lengths(step_of([[1.0, 0.9]], flat)) == [1]


def test_short_room_goes_to_the_likeliest_tokens_above_the_threshold():
    survivals = [[0.6, 0.5], [0.9, 0.8]]
    assert ThresholdScheduler(0.1).lengths(step_of(survivals, flat, max_tokens=5)) == [1, 2]


def test_fixed_verifies_so_many_of_each_draft_whatever_its_confidence():
    survivals = [[0.0, 0.0, 0.0], [0.9], []]
    assert FixedScheduler(2).lengths(step_of(survivals, flat)) == [2, 1, 0]
    assert FixedScheduler(0).lengths(step_of(survivals, flat)) == [0, 0, 0]


def test_fixed_shares_short_room_evenly():
    survivals = [[0.9] * 5, [0.1], [0.9] * 5]
    assert FixedScheduler(5).lengths(step_of(survivals, flat, max_tokens=9)) == [3, 1, 2]


# -- what holds for all --------------------------------------------------------------------------------------------


def run(name: str, step: DraftedStep) -> list[int]:
    scheduler = SCHEDULERS[name]()
    return [scheduler.lengths(step) for _ in range(3)][-1]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("seed", range(10))
def test_lengths_stay_within_drafts_and_budget(seed, name):
    step = random_step(seed, num_requests=5, max_tokens=9)
    lengths = run(name, step)
    assert all(0 <= length <= len(a) for length, a in zip(lengths, step.survivals, strict=True))
    assert step.num_other_tokens + sum(lengths) <= 9


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_requests_does_not_matter(seed, name):
    """Case J7. Survivals differ, and the fixed lengths find room."""
    step = random_step(seed, num_requests=5)
    order = np.random.default_rng(seed).permutation(5)
    shuffled = DraftedStep(
        survivals=[step.survivals[i] for i in order],
        num_other_tokens=step.num_other_tokens,
        max_tokens=step.max_tokens,
        step_s=step.step_s,
    )
    lengths = run(name, step)
    assert run(name, shuffled) == [lengths[i] for i in order]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_input_stays_as_it_was(name):
    survivals = [[0.9, 0.5], [], [0.7, 0.7, 0.1]]
    before = copy.deepcopy(survivals)
    run(name, step_of(survivals, flat))
    assert survivals == before


@pytest.mark.parametrize("name", SCHEDULERS)
def test_no_room_is_no_drafts_and_no_requests_are_no_lengths(name):
    """Cases J8 and J10."""
    assert run(name, step_of([[0.9, 0.8], [0.9]], flat, max_tokens=2)) == [0, 0]
    assert run(name, step_of([[0.9, 0.8], [0.9]], flat, num_other_tokens=8, max_tokens=4)) == [0, 0]
    assert run(name, step_of([[], []], flat)) == [0, 0]
    assert run(name, step_of([], flat)) == []


@pytest.mark.parametrize("name", ["early_stop", "foresight", "delayed", "threshold"])
def test_a_token_that_cannot_be_accepted_is_never_verified(name):
    """Case J10: c = (0, .9), (1, 1, 1) and (.9, NaN, .9)."""
    survivals = [survivals_of(c) for c in ([0.0, 0.9], [1.0, 1.0, 1.0], [0.9, math.nan, 0.9])]
    assert run(name, step_of(survivals, flat)) == [0, 3, 1]


@pytest.mark.parametrize("name", ["early_stop", "foresight", "delayed", "threshold"])
def test_a_short_budget_ranks_by_survival_across_requests(name):
    """Case J4: the two places go to .5 and to .4, not to the confidence of .99 that follows it."""
    survivals = [survivals_of([0.4, 0.99, 0.99]), survivals_of([0.5, 0.3])]
    assert run(name, step_of(survivals, flat, max_tokens=4)) == [1, 1]


def test_a_weak_request_keeps_its_own_token():
    """Case J13: it gets no extras, and none of the extras takes its anchor's place."""
    survivals = [survivals_of([0.01] * 7)] + [survivals_of([0.99] * 7)] * 7
    lengths = EarlyStopScheduler().lengths(step_of(survivals, flat, max_tokens=8 + 14))
    assert lengths == [0, 2, 2, 2, 2, 2, 2, 2]


def test_survivals_are_running_products_in_the_unit_interval():
    assert survivals_of([0.5, 0.5, 0.0, 0.9]) == [0.5, 0.25, 0.0, 0.0]
    assert survivals_of([0.5, math.nan, 0.9]) == [0.5, 0.0, 0.0]
    assert survivals_of([1.5, -0.5]) == [1.0, 0.0]
    assert survivals_of([math.inf, 1.0]) == [1.0, 1.0]
    assert survivals_of([]) == []


def test_a_table_of_survivals_holds_what_the_lists_say_up_to_its_steps():
    drafts = [[0.5, 0.5, 0.0, 0.9], [], [1.5, 0.9999999], [0.5, math.nan, 0.9], [-0.5]]
    table = SurvivalTable.rounded(drafts)
    assert list(table) == [[0.5, 0.25, 0.0, 0.0], [], [1.0, 1.0], [0.5, 0.0, 0.0], [0.0]]
    assert [len(row) for row in table[1:3]] == [0, 2]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("seed", range(5))
def test_a_table_gives_the_lengths_of_its_lists(seed, name):
    step = random_step(seed, num_requests=5, max_tokens=14)
    table = SurvivalTable.rounded([[b / a for a, b in zip([1.0, *a], a, strict=False)] for a in step.survivals])
    assert run(name, dataclasses.replace(step, survivals=table)) == run(
        name, dataclasses.replace(step, survivals=list(table))
    )


@pytest.mark.parametrize("survivals", [[0.5, 0.6], [1.1], [0.5, -0.1], [math.nan], [0.9, math.nan, 0.1]])
def test_survivals_that_are_none_are_refused(survivals):
    with pytest.raises(AssertionError, match="must fall along each draft"):
        EarlyStopScheduler().lengths(step_of([survivals, [0.9]], flat))
