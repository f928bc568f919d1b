"""The planner on a simulated machine: when it drafts, for whom, how far drafts are verified, and what that costs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from planner_simulation import CPU, CPU_TARGET, GPU, NUM_DRAFT_TOKENS, OVERHEAD_S, TILES, Machine, always, curve

from dspark.speculation.capacity import MeasuredTimes, StepTimes
from dspark.speculation.joining import PassCosts, best_joining
from dspark.speculation.planner import SCHEDULERS, Load, Planner
from dspark.speculation.prefix_scheduler import survivals_of
from dspark.speculation.proposal import NO_FORECAST, Forecast

LINEAR_S = {"first": 0.9, "second": 0.05}  # case J5: seconds of a token beside the first, in seconds of a step


def planner_of(scheduler: str = "auto", times: MeasuredTimes | None = CPU, **settings) -> Planner:
    return Planner(
        scheduler=scheduler,
        times=None if times is None else StepTimes(times),
        **{"confidence_threshold": 0.5, "num_draft_tokens": NUM_DRAFT_TOKENS, **settings},
    )


def load_of(num_decoding: int, *, max_tokens: int = 256, num_prefill_tokens: int = 0, **fields) -> Load:
    return Load(
        num_decoding=num_decoding,
        num_prefill_tokens=num_prefill_tokens,
        max_tokens=max_tokens,
        context_len=0.0,
        **fields,
    )


def j5_times(part: str) -> MeasuredTimes:
    """Return a pass of 1 + share * l seconds after a draft of .3 seconds, in tenths."""
    target = {b: 100 * (1 + LINEAR_S[part] * (b - 1)) for b in (1, 2, 8)}
    return MeasuredTimes(target=curve(target), max_tokens=64, draft=curve({1: 30, 2: 30}))


# -- never slower, and close to the best fixed length --------------------------------------------------------------


def test_drafts_that_never_pay_are_given_up():
    """Case J5, first part: a verified token costs nearly a step, so that no acceptance makes up for the draft."""
    machine = Machine(j5_times("first"), num_requests=1, acceptance=always(0.8))
    machine.run(40)
    assert machine.run(2000) >= 0.97 * machine.plain_rate()
    assert 0 < machine.planner.num_probes < 200  # it goes on looking


def test_drafts_that_pay_are_verified_whole():
    """Case J5, second part."""
    machine = Machine(j5_times("second"), num_requests=1, acceptance=always(0.8))
    machine.run(40)
    machine.run(100)
    assert machine.joined == ["r000"]
    assert machine.lengths == {"r000": NUM_DRAFT_TOKENS}
    assert machine.planner.num_probes == 0


@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_hostile_text_costs_no_more_than_the_probes(num_requests):
    """Case J6: no pass and no verified token between the probes, which take one percent."""
    machine = Machine(CPU, num_requests=num_requests, acceptance=always(0.02))
    machine.run(60)
    num_idle, plain = 0, machine.plain_rate()
    rate = machine.run(500)
    for _ in range(100):
        drafted = bool(machine.joined)
        machine.step()
        num_idle += not drafted and not any(machine.lengths.values())
    assert rate >= 0.98 * plain
    assert num_idle >= 90


@pytest.mark.parametrize("times", [CPU, GPU, TILES], ids=["cpu", "gpu", "tiles"])
@pytest.mark.parametrize("num_requests", [1, 4, 16, 32])
@pytest.mark.parametrize("confidence", [0.05, 0.3, 0.5, 0.7, 0.9])
def test_auto_is_never_slower_than_plain_and_near_the_best_fixed_length(times, num_requests, confidence):
    machine = Machine(times, num_requests=num_requests, acceptance=always(confidence))
    machine.run({1: 60, 4: 100}.get(num_requests, 300))
    rate = machine.run(300 if num_requests < 16 else 150)
    fixed = [machine.fixed_rate(length, [confidence] * NUM_DRAFT_TOKENS) for length in (1, 3, 5, 7)]
    assert rate >= 0.97 * machine.plain_rate()
    assert rate >= 0.95 * max(fixed)


def test_requests_that_draft_well_draft_alone():
    """Half of the requests repeat themselves, half are noise."""

    def acceptance(request_id, clock_s):
        return [0.95 if int(request_id[1:]) % 2 == 0 else 0.02] * NUM_DRAFT_TOKENS

    machine = Machine(CPU, num_requests=4, acceptance=acceptance)
    machine.run(150)
    joined = [set(machine.joined) for _ in range(100) if machine.run(1)]
    assert all({"r000", "r002"} <= names for names in joined)
    assert sum(len(names) > 2 for names in joined) <= 10  # probes
    assert machine.run(200) > 1.2 * machine.plain_rate()


# -- it adapts -----------------------------------------------------------------------------------------------------


def mean_length(machine: Machine, num_steps: int) -> float:
    lengths = []
    for _ in range(num_steps):
        machine.step()
        lengths += machine.lengths.values()
    return sum(lengths) / len(lengths)


def test_verified_length_falls_as_concurrency_rises():
    means = []
    for num_requests in (1, 2, 4, 8, 16, 32, 64):
        machine = Machine(CPU, num_requests=num_requests, acceptance=always(0.8))
        machine.run(60)
        means.append(mean_length(machine, 60))
    assert means[0] == 7.0
    assert means[-1] < 0.3
    assert all(later <= earlier + 0.1 for earlier, later in itertools.pairwise(means))


def test_a_five_fold_jump_in_load_settles_within_20_steps():
    machine = Machine(CPU, num_requests=4, acceptance=always(0.8))
    machine.run(100)
    machine.request_ids += [f"r{i:03d}" for i in range(4, 20)]
    machine.run(20)
    settled = mean_length(machine, 20)
    assert mean_length(machine, 100) == pytest.approx(settled, abs=0.3)


@pytest.mark.parametrize("times", [CPU, GPU], ids=["cpu", "gpu"])
def test_drafting_comes_back_within_two_seconds(times):
    machine = Machine(
        times,
        num_requests=1,
        acceptance=lambda request_id, clock_s: [0.02 if clock_s < 20.0 else 0.9] * NUM_DRAFT_TOKENS,
    )
    while machine.clock_s < 20.0:
        machine.step()
    assert not machine.joined
    while machine.clock_s < 22.0:
        machine.step()
    rate, best = machine.run(200), machine.fixed_rate(7, [0.9] * NUM_DRAFT_TOKENS)
    assert rate >= 0.95 * best


def test_drafting_comes_back_at_once_when_the_load_falls():
    """No probe is needed: the forecasts are the same, the machine is not."""
    machine = Machine(CPU, num_requests=32, acceptance=always(0.7))
    machine.run(60)
    assert len(machine.joined) <= 4
    for request_id in machine.request_ids[1:]:
        machine.finish(request_id)
    machine.run(2)
    assert machine.joined == ["r000"]


def test_it_does_not_flap_where_drafting_is_worth_nothing_either_way():
    planner, load = planner_of(), load_of(1)
    target_s, draft_s = 0.031, 0.006
    # A draft of one token that breaks even, and 1 % more and less of it.
    even = (0.034 + draft_s) / target_s - 1.0
    decisions = []
    for share in (1.05, 1.01, 0.9, 1.01, 1.05, 1.2, 1.05, 1.01):
        [joins] = planner.choose(["a"], [Forecast(paid=[even * share])], load)
        decisions.append(joins)
    assert decisions == [True, True, False, False, False, True, True, True]


# -- probes --------------------------------------------------------------------------------------------------------


def declined_rounds(planner: Planner, num_rounds: int, *, accepts: bool, step_s: float = 0.031) -> list[int]:
    """Return the rounds in which a hopeless request was probed."""
    probed = []
    for i in range(num_rounds):
        planner.observe_step(
            num_tokens=1, context_len=0.0, target_s=step_s, draft_s=0.0, num_drafted_for=0, overhead_s=0.0
        )
        [joins] = planner.choose(["a"], [Forecast(paid=[0.01])], load_of(1))
        if joins:
            probed.append(i)
            [length] = planner.lengths(["a"], [[0.0] * NUM_DRAFT_TOKENS], load_of(1))
            assert length >= 1  # whatever the drafter says of it, else nothing would be learned
            planner.observe_verdict("a", length if accepts else 0)
    return probed


def test_probes_that_fail_take_one_percent_of_the_time():
    rounds = declined_rounds(planner_of(), 1000, accepts=False)
    assert rounds[0] == 8
    gaps = np.diff(rounds)
    assert gaps.min() >= 20 and gaps.max() <= 40  # a probe takes 9 ms of 31 ms
    assert 9 * len(rounds) <= 0.0105 * 31 * 1000


def test_a_probe_that_does_well_is_followed_by_longer_ones_at_once():
    planner = planner_of()
    first = declined_rounds(planner, 9, accepts=True)
    assert first == [8]
    planner.observe_step(num_tokens=1, context_len=0, target_s=0.031, draft_s=0, num_drafted_for=0, overhead_s=0)
    assert planner.choose(["a"], [Forecast(paid=[0.01])], load_of(1)) == [True]
    assert planner.lengths(["a"], [[0.0] * 7], load_of(1)) == [2]


def test_probed_lengths_are_settled_before_anything_is_drawn():
    """A probe verifies its token whatever is stated of it, and what follows is up to the confidences."""
    planner = planner_of()
    declined_rounds(planner, 8, accepts=False)
    assert planner.choose(["a"], [Forecast(paid=[0.01])], load_of(1)) == [True]
    assert planner.lengths(["a"], [[0.0, 0.9]], load_of(1)) == [1]
    assert planner.lengths(["a"], [[0.9, 0.9]], load_of(1)) == [2]
    assert planner.lengths(["a"], [[0.9, 0.9]], load_of(1, max_tokens=1)) == [0]
    assert planner.lengths(["a"], [()], load_of(1)) == [0]


def test_a_new_request_of_an_old_id_is_not_probed_in_its_place():
    """Case J9."""
    planner = planner_of()
    declined_rounds(planner, 7, accepts=False)
    planner.release("a")
    assert declined_rounds(planner, 8, accepts=False) == []


def test_who_was_declined_is_counted_by_reason():
    planner = planner_of()
    declined_rounds(planner, 20, accepts=False)
    planner.choose(["a"], [Forecast(paid=[0.9])], load_of(1, max_tokens=1))
    assert planner.num_probes == 1
    assert planner.num_declined == {"not_worth_it": 19, "no_room": 1}


# -- choose --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_joining_requests_are_the_best_of_all_sets(seed):
    """Brute force over the sets of joining requests and the verified tokens. Survivals are whole steps."""
    generator = np.random.default_rng(seed)

    def survivals(num: int) -> list[float]:
        return sorted((generator.integers(1, 128, num) / 128).tolist(), reverse=True)

    forecasts = [Forecast(free=survivals(int(generator.integers(0, 3))), paid=survivals(3)) for _ in range(4)]
    target_s = np.concatenate(([0.0], 1.0 + 0.1 * np.arange(30) + 0.5 * (np.arange(30) // 6)))
    costs = PassCosts(
        num_tokens_out=4,
        num_other_tokens=4,
        room=9,
        target_s=lambda num_tokens: target_s[num_tokens],
        draft_s=lambda num: 0.2 * (num > 0) + 0.05 * num,
        fixed_s=0.1,
    )

    def best_theta(joins) -> float:
        drafts = [f.paid if join else f.free for f, join in zip(forecasts, joins, strict=True)]
        ranked = sorted(itertools.chain.from_iterable(drafts), reverse=True)
        fixed_s = float(costs.draft_s(np.array([sum(joins)]))[0]) + 0.1
        return max((4 + sum(ranked[:n])) / (target_s[4 + n] + fixed_s) for n in range(min(len(ranked), 9) + 1))

    best = best_joining(["a", "b", "c", "d"], forecasts, costs)
    thetas = {joins: best_theta(joins) for joins in itertools.product((False, True), repeat=4)}
    # Gains rank the requests, which is the best set but for ties with a free draft nobody verifies.
    assert best.theta == pytest.approx(thetas[tuple(i in best.order for i in range(4))], rel=1e-12)
    assert best.theta >= 0.99 * max(thetas.values())
    assert best.plain_theta == pytest.approx(thetas[(False,) * 4], rel=1e-12)


def test_of_equal_requests_the_lower_ids_join_wherever_they_stand():
    """Case J7: room for a few of many equal requests."""
    forecast = Forecast(paid=[0.9, 0.85, 0.8])
    ids = [f"r{i:02d}" for i in range(12)]
    load = load_of(12, max_tokens=18)
    chosen = {r for r, join in zip(ids, planner_of().choose(ids, [forecast] * 12, load), strict=True) if join}
    assert 0 < len(chosen) < 12
    assert chosen == set(ids[: len(chosen)])
    shuffled = [ids[i] for i in np.random.default_rng(0).permutation(12)]
    again = planner_of().choose(shuffled, [forecast] * 12, load)
    assert {r for r, join in zip(shuffled, again, strict=True) if join} == chosen


def test_a_draft_that_is_free_leaves_less_to_gain_by_a_pass():
    paid = [0.7, 0.5]
    assert planner_of().choose(["a"], [Forecast(paid=paid)], load_of(1)) == [True]
    assert planner_of().choose(["a"], [Forecast(paid=paid, free=[0.7, 0.45])], load_of(1)) == [False]


def test_without_forecasts_of_a_pass_nobody_joins():
    assert planner_of().choose(["a", "b"], [NO_FORECAST, Forecast(free=[0.9])], load_of(2)) == [False, False]
    assert planner_of().choose([], [], load_of(0)) == []


def test_forecasts_that_are_no_probabilities_promise_nothing():
    forecasts = [Forecast(paid=[math.nan, math.nan]), Forecast(paid=[0.0]), Forecast(paid=[-1.0])]
    assert planner_of(times=GPU).choose(["a", "b", "c"], forecasts, load_of(3)) == [False, False, False]


def test_threshold_and_fixed_draft_always_and_need_no_times():
    for name in ("threshold", "fixed"):
        planner = planner_of(name, None, num_draft_tokens=2)
        assert planner.choose(["a", "b"], [Forecast(paid=[0.01]), NO_FORECAST], load_of(2)) == [True, False]
        assert planner.lengths(["a", "b"], [[0.9, 0.4, 0.9], None], load_of(2)) == [1 if name == "threshold" else 2, 0]
    for name in ("auto", "early_stop", "delayed"):
        with pytest.raises(AssertionError, match="needs measured step times"):
            planner_of(name, None)


# -- lengths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULERS)
def test_lengths_at_the_edges(name):
    """Case J10: no requests, no drafts, no room, more tokens than were ever measured, c outside [0, 1] and NaN."""
    planner = planner_of(name, GPU)
    assert planner.lengths([], [], load_of(0)) == []
    assert planner.lengths(["a", "b"], [None, ()], load_of(2)) == [0, 0]
    assert planner.lengths(["a"], [[0.9] * 7], load_of(1, max_tokens=1)) == [0]
    assert planner.lengths(["a"], [[0.9] * 7], load_of(1, num_prefill_tokens=9, max_tokens=8)) == [0]
    many = planner.lengths([f"r{i}" for i in range(300)], [[0.9] * 7] * 300, load_of(300, max_tokens=4000))
    assert all(0 <= length <= 7 for length in many)
    edges = [[0.9, math.nan, 0.9], [1.5, 1.0], [0.0, 0.9], [-1.0]]
    lengths = planner.lengths(list("abcd"), edges, load_of(4))
    assert lengths == ([3, 2, 2, 1] if name == "fixed" else [1, 2, 0, 0])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_noise_in_the_last_bits_and_the_order_of_requests_change_nothing(name):
    """Case J7."""
    generator = np.random.default_rng(3)
    ids = [f"r{i:02d}" for i in range(10)]
    drafts = [[0.9, 0.8, 0.5][: i % 4] if i < 6 else generator.uniform(0.3, 1.0, 3).tolist() for i in range(10)]
    expected = dict(zip(ids, planner_of(name).lengths(ids, drafts, load_of(10, max_tokens=22)), strict=True))
    for seed in range(5):
        generator = np.random.default_rng(seed)
        order = generator.permutation(10)
        noisy = [[c * (1.0 + generator.uniform(-1e-7, 1e-7)) for c in drafts[i]] for i in order]
        names = [ids[i] for i in order]
        assert (
            dict(zip(names, planner_of(name).lengths(names, noisy, load_of(10, max_tokens=22)), strict=True))
            == expected
        )


def test_a_weak_request_keeps_its_token_in_every_step():
    """Case J13: its draft is not verified, and no draft takes its place."""
    planner, ids = planner_of(), [f"r{i}" for i in range(8)]
    for _ in range(200):
        lengths = planner.lengths(ids, [[0.01] * 7] + [[0.99] * 7] * 7, load_of(8, max_tokens=16))
        assert lengths[0] == 0
        assert 0 < sum(lengths) <= 8


@pytest.mark.parametrize("name", ["auto", "delayed"])
def test_confidences_go_with_the_request_not_with_its_row(name):
    """Case J9: two requests swap rows in each step, and a third takes over the row of one that leaves."""
    planner, confidences = planner_of(name), {"sure": [0.99] * 5, "weak": [0.01] * 5}
    for i in range(6):
        ids = ["sure", "weak"][:: 1 if i % 2 else -1]
        lengths = dict(zip(ids, planner.lengths(ids, [confidences[r] for r in ids], load_of(2)), strict=True))
        assert lengths["weak"] == 0 < lengths["sure"]
    planner.release("sure")
    if name == "auto":  # a delayed budget is that of two steps ago, whoever was there
        assert planner.lengths(["new", "weak"], [[0.02] * 5, confidences["weak"]], load_of(2)) == [0, 0]


def test_tokens_of_prefill_are_tokens_of_the_step():
    """Up to the eighth token a step costs nearly the same: seven drafted ones beside the anchor, two beside prefill."""
    times = MeasuredTimes(target=curve({1: 30, 8: 31, 9: 60, 64: 600}), max_tokens=64)
    draft = [[0.9] * 9]
    assert planner_of("early_stop", times).lengths(["a"], draft, load_of(1)) == [7]
    load = load_of(1, num_prefill_tokens=5)
    assert planner_of("early_stop", times).lengths(["a"], draft, load) == [2]


def test_auto_looks_past_a_jag_to_the_next_tile():
    """Four requests fill the first tile with drafts that are nearly sure; a full second one is worth its price."""
    ids, drafts = list("abcd"), [[0.97] * 7] * 4
    assert sum(planner_of("early_stop").lengths(ids, drafts, load_of(4))) == 4
    assert sum(planner_of("auto").lengths(ids, drafts, load_of(4))) == 28


# -- a batch that changes ------------------------------------------------------------------------------------------


def test_a_draining_batch_plans_every_step_for_those_who_are_left():
    """Case J8: 33 requests of 1 to 33 rounds, then one alone."""
    machine = Machine(CPU, num_requests=33, acceptance=always(0.8))
    for num_left in range(32, -1, -1):
        machine.step()
        assert set(machine.lengths) == set(machine.request_ids)
        machine.finish(machine.request_ids[num_left])
    machine.step()
    assert machine.lengths == {} and machine.joined == []
    machine.request_ids.append("late")
    machine.run(30)
    assert machine.joined == ["late"] and machine.lengths["late"] > 0


def test_no_number_of_requests_falls_off_a_cliff():
    """Case J12."""
    rates = []
    for num_requests in range(1, 21):
        machine = Machine(CPU, num_requests=num_requests, acceptance=always(0.85))
        machine.run(60)
        rates.append(machine.run(60))
    for before, rate, after in zip(rates, rates[1:], rates[2:], strict=False):
        assert rate >= 0.7 * (before + after) / 2


# -- what it learns from production --------------------------------------------------------------------------------


def test_overhead_is_a_running_mean_that_a_stall_hardly_moves():
    planner = planner_of()
    for overhead_s in [0.002] * 100 + [5.0]:
        planner.observe_step(
            num_tokens=1, context_len=0.0, target_s=0.031, draft_s=0.0, num_drafted_for=0, overhead_s=overhead_s
        )
    assert planner.overhead_s == pytest.approx(0.002, rel=0.1)


def test_step_times_follow_the_machine():
    planner = planner_of()
    before = planner.step_s(1, 0.0)
    for _ in range(100):
        planner.observe_step(
            num_tokens=1, context_len=0.0, target_s=0.062, draft_s=0.012, num_drafted_for=1, overhead_s=0.0
        )
    assert planner.times is not None
    assert planner.times.draft_s(1) == pytest.approx(0.012, rel=0.02)
    assert planner.step_s(1, 0.0) - 0.012 == pytest.approx(2 * before, rel=0.02)


def test_the_planned_step_is_predicted():
    planner = planner_of()
    planner.lengths(["a", "b"], [[0.99] * 7, [0.99] * 7], load_of(2))
    assert planner.predicted_target_s == pytest.approx(CPU_TARGET[16] / 1000)
    planner.choose(["a"], [Forecast(paid=[0.9] * 7)], load_of(1))
    assert planner.predicted_step_s == pytest.approx(CPU_TARGET[16] / 1000 + 0.006)


def test_a_pass_that_was_never_measured_is_learned_from_the_first_one():
    """SPS files of other engines know no drafting pass."""
    planner = planner_of(times=MeasuredTimes(target=curve(CPU_TARGET), max_tokens=256))
    forecast = [Forecast(paid=survivals_of([0.5] * 5))]
    assert planner.choose(["a"], forecast, load_of(1)) == [True]
    planner.observe_step(
        num_tokens=6, context_len=0.0, target_s=0.043, draft_s=0.5, num_drafted_for=1, overhead_s=OVERHEAD_S
    )
    assert planner.choose(["a"], forecast, load_of(1)) == [False]
