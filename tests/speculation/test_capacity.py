"""The machine's speed: what is made of timings, what is predicted between and beyond them, how it drifts, its file."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from dspark.errors import ConfigError
from dspark.speculation.capacity import (
    MeasuredTimes,
    StepTimes,
    TimeCurve,
    read_measured_times,
    write_measured_times,
)
from dspark.speculation.prefix_scheduler import DraftedStep, EarlyStopScheduler

SIZES = (1, 2, 4, 8)
MEASURED = MeasuredTimes(
    target=TimeCurve(SIZES, (0.10, 0.12, 0.16, 0.32)),
    max_tokens=16,
    context_len=100,
    long_target=TimeCurve(SIZES, (0.20, 0.22, 0.26, 0.52)),
    long_context_len=1100,
    draft=TimeCurve((1, 4), (0.010, 0.016)),
    details={"hardware": "two cores", "num_threads": 2},
)


def target_s(times: StepTimes, num_tokens: int, context_len: float = 100) -> float:
    return float(times.target_s(np.array([num_tokens]), context_len)[0])


def curve_of(*points: tuple[int, float], spread: float = 0.01) -> TimeCurve:
    """Return the curve of five timings per point that lie within `spread` (a share) of it."""
    return TimeCurve.from_samples({size: [s * (1 + spread * k) for k in (-1, -0.5, 0, 0.5, 1)] for size, s in points})


# -- from timings to a curve ---------------------------------------------------------------------------------------


def test_a_point_is_the_median_of_its_timings():
    curve = TimeCurve.from_samples({2: [0.3, 0.2, 9.0], 1: [0.1, 0.1, 0.1]})
    assert curve == TimeCurve((1, 2), (0.1, 0.3))


def test_a_fall_within_the_spread_is_noise_and_pooled():
    assert curve_of((1, 1.0), (2, 1.205), (3, 1.195), (4, 1.5), spread=0.02).seconds == pytest.approx(
        [1, 1.2, 1.2, 1.5]
    )


def test_a_pooled_fall_pulls_in_the_points_before_it():
    """1.200, 1.205, 1.190: the last pulls down the second, and both together the first."""
    curve = curve_of((1, 1.0), (2, 1.2), (3, 1.205), (4, 1.19), spread=0.02)
    mean = (1.2 + 1.205 + 1.19) / 3
    assert curve.seconds == pytest.approx([1.0, mean, mean, mean])


def test_a_clear_fall_is_a_jag_of_the_machine_and_stays():
    """Case J12: three tokens fit no tile."""
    assert curve_of((1, 1.0), (2, 1.1), (3, 1.6), (4, 1.2)).seconds == pytest.approx([1.0, 1.1, 1.6, 1.2])


def test_the_same_fall_is_noise_where_timings_vary_more():
    points = ((1, 1.0), (2, 1.3), (3, 1.2), (4, 1.5))
    assert curve_of(*points, spread=0.01).seconds == pytest.approx([1.0, 1.3, 1.2, 1.5])
    assert curve_of(*points, spread=0.10).seconds == pytest.approx([1.0, 1.25, 1.25, 1.5])


def test_one_stalled_timing_neither_hides_nor_makes_a_jag():
    steady = {1: [1.0, 1.01, 0.99, 1.0, 1.0], 3: [1.61, 1.6, 1.59, 1.6, 1.6], 4: [1.2, 1.21, 1.19, 1.2, 9.0]}
    assert TimeCurve.from_samples(steady).seconds == pytest.approx([1.0, 1.6, 1.2])
    stalled = {1: [1.0, 1.01, 0.99, 1.0, 1.0], 2: [1.1, 1.11, 1.09, 1.1, 9.0], 3: [1.2, 1.21, 1.19, 1.2, 1.2]}
    assert TimeCurve.from_samples(stalled).seconds == pytest.approx([1.0, 1.1, 1.2])


def test_timings_that_agree_by_chance_are_given_the_spread_of_the_others():
    """Three equal timings at 2 and at 3 do not make their difference of half a percent a jag."""
    wide = [0.97, 1.0, 1.03]
    samples = {1: wide, 2: [1.206] * 3, 3: [1.2] * 3, 4: [2 * w for w in wide], 5: [3 * w for w in wide]}
    assert TimeCurve.from_samples(samples).seconds == pytest.approx([1.0, 1.203, 1.203, 2.0, 3.0])


def test_points_with_too_few_timings_to_show_a_spread_are_refused():
    with pytest.raises(AssertionError):
        TimeCurve.from_samples({1: [0.1, 0.1, 0.1], 2: [0.2, 0.2]})


# -- predictions ---------------------------------------------------------------------------------------------------


def test_between_grid_points_time_is_linear():
    times = StepTimes(MEASURED)
    assert times.target_s(np.array([1, 2, 3, 4, 6, 8]), 100) == pytest.approx([0.10, 0.12, 0.14, 0.16, 0.24, 0.32])


def test_beyond_the_grid_time_goes_on_as_it_last_rose():
    """Case J10. The last rise is .04 a token; after a jag it is the rise before it that counts."""
    assert target_s(StepTimes(MEASURED), 108) == pytest.approx(0.32 + 100 * 0.04)
    jagged = MeasuredTimes(target=TimeCurve((1, 2, 3), (1.0, 2.0, 1.5)), max_tokens=3)
    assert target_s(StepTimes(jagged), 5) == pytest.approx(1.5 + 2 * 1.0)


def test_a_machine_measured_flat_stays_flat():
    """Case J1."""
    flat = MeasuredTimes(target=TimeCurve((1, 8), (0.5, 0.5)), max_tokens=8)
    assert target_s(StepTimes(flat), 1000) == 0.5


def test_time_is_linear_in_the_context_and_never_below_the_shorter_one():
    times = StepTimes(MEASURED)
    assert [target_s(times, 1, c) for c in (0, 100, 600, 1100, 2100)] == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.3])


def test_a_long_context_that_seems_faster_is_noise():
    measured = MeasuredTimes(
        target=TimeCurve((1, 2), (0.12, 0.2)),
        max_tokens=2,
        context_len=10,
        long_target=TimeCurve((1, 2), (0.10, 0.3)),
        long_context_len=20,
    )
    times = StepTimes(measured)
    assert [target_s(times, 1, c) for c in (10, 20, 1000)] == pytest.approx([0.11, 0.11, 0.11])
    assert [target_s(times, 2, c) for c in (10, 20)] == pytest.approx([0.2, 0.3])


def test_drafting_passes_have_a_curve_of_their_own():
    times = StepTimes(MEASURED)
    assert [times.draft_s(n) for n in (0, 1, 2, 4, 6)] == pytest.approx([0, 0.010, 0.012, 0.016, 0.020])


def test_drafting_passes_that_were_not_measured_are_not_taken_for_free():
    """Case J5."""
    times = StepTimes(MeasuredTimes(target=TimeCurve((1, 2), (1.0, 1.1)), max_tokens=2))
    assert not times.has_draft_times
    with pytest.raises(AssertionError, match="no drafting pass was measured"):
        times.draft_s(1)


def test_a_scheduler_runs_on_it():
    times = StepTimes(MEASURED)
    step = DraftedStep(
        survivals=[[0.9, 0.8, 0.7, 0.6, 0.5]],
        num_other_tokens=1,
        max_tokens=16,
        step_s=lambda num_tokens: times.target_s(num_tokens, 100),
        fixed_s=times.draft_s(1),
    )
    assert EarlyStopScheduler().lengths(step) == [3]  # four tokens: 3.4 in .17 s; a fifth: 4 in .21 s


# -- drift ---------------------------------------------------------------------------------------------------------


def observe(times: StepTimes, num_steps: int, *, size: int, ratio: float) -> None:
    seconds = ratio * target_s(StepTimes(times.measured), size, 600)
    for _ in range(num_steps):
        times.observe_target(size, 600, seconds)


def test_steps_as_measured_change_nothing():
    times = StepTimes(MEASURED)
    observe(times, 50, size=3, ratio=1.0)
    assert target_s(times, 3) == pytest.approx(0.14)
    assert times.target_drift == pytest.approx(1.0)


def test_one_step_hardly_counts_however_long_it_took():
    times = StepTimes(MEASURED)
    observe(times, 1, size=4, ratio=1000.0)
    assert 1.0 < target_s(times, 4) / 0.16 < 1.05


def test_a_slower_machine_is_followed_within_fifty_steps():
    times = StepTimes(MEASURED)
    observe(times, 50, size=4, ratio=1.4)
    assert target_s(times, 4) == pytest.approx(1.4 * 0.16, rel=0.01)


def test_other_sizes_follow_a_slower_machine_most_of_the_way():
    times = StepTimes(MEASURED)
    observe(times, 100, size=8, ratio=1.4)
    assert target_s(times, 1) == pytest.approx(1.4 ** (0.06 / 0.08) * 0.10, rel=0.01)
    assert times.target_drift == pytest.approx(1.4 ** (0.06 / 0.08), rel=0.01)


def test_one_size_measured_wrongly_is_corrected_beside_the_others():
    """Steps of one token are as measured, steps of eight take 1.3 times as long."""
    times = StepTimes(MEASURED)
    for _ in range(300):
        observe(times, 1, size=1, ratio=1.0)
        observe(times, 1, size=8, ratio=1.3)
    assert target_s(times, 1) == pytest.approx(0.10, rel=0.03)
    assert target_s(times, 8) == pytest.approx(1.3 * 0.32, rel=0.03)


def test_a_correction_leaves_no_edge_between_neighbouring_sizes():
    times = StepTimes(MEASURED)
    observe(times, 100, size=6, ratio=1.5)  # between the grid points 4 and 8
    predicted = times.target_s(np.array([4, 5, 6, 7, 8]), 100)
    assert np.diff(predicted) == pytest.approx([np.diff(predicted)[0]] * 4)


@pytest.mark.parametrize(("ratio", "bound"), [(1e6, 6.0), (1e-6, 1 / 6.0)])
def test_drift_is_bounded(ratio, bound):
    times = StepTimes(MEASURED)
    observe(times, 2000, size=4, ratio=ratio)
    assert target_s(times, 4) / 0.16 == pytest.approx(bound)  # 4 for all sizes, 1.5 for this one
    assert target_s(times, 1) / 0.10 == pytest.approx(4.0 if bound > 1 else 0.25)


def test_the_machine_coming_back_is_followed_too_and_a_reset_is_immediate():
    times = StepTimes(MEASURED)
    observe(times, 500, size=4, ratio=3.0)
    observe(times, 100, size=4, ratio=1.0)
    assert target_s(times, 4) == pytest.approx(0.16, rel=0.01)
    observe(times, 100, size=4, ratio=3.0)
    times.reset_drift()
    assert target_s(times, 4) == pytest.approx(0.16)


def test_drafting_passes_drift_on_their_own():
    times = StepTimes(MEASURED)
    for _ in range(100):
        times.observe_draft(2, 2 * 0.012)
    assert times.draft_s(2) == pytest.approx(0.024, rel=0.01)
    assert target_s(times, 4) == pytest.approx(0.16)
    times.reset_drift()
    assert times.draft_s(2) == pytest.approx(0.012)


# -- the file ------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_again(tmp_path):
    path = tmp_path / "cache" / "capacity.json"
    write_measured_times(path, MEASURED)
    again = read_measured_times(path)
    assert again.target.seconds == pytest.approx(MEASURED.target.seconds, rel=1e-12)
    assert again.long_target is not None
    assert again.long_target.seconds == pytest.approx(MEASURED.long_target.seconds, rel=1e-12)
    assert (again.target.sizes, again.max_tokens, again.draft) == (SIZES, 16, MEASURED.draft)
    assert (again.context_len, again.long_context_len) == (100, 1100)
    assert again.details == {"hardware": "two cores", "num_threads": 2}
    assert [entry.name for entry in path.parent.iterdir()] == ["capacity.json"]


def test_the_file_has_the_three_keys_of_other_engines_and_the_details(tmp_path):
    path = tmp_path / "capacity.json"
    write_measured_times(path, MEASURED)
    values = json.loads(path.read_text())
    assert values["sample_batch_tokens"] == [1, 2, 4, 8]
    assert values["sample_steps_per_sec"] == pytest.approx([10.0, 1 / 0.12, 6.25, 3.125])
    assert values["max_batch_tokens"] == 16
    assert values["hardware"] == "two cores"


def test_the_file_of_another_engine_knows_no_context_and_no_drafting_pass(tmp_path):
    path = tmp_path / "sps.json"
    foreign = {"sample_batch_tokens": [8, 16], "sample_steps_per_sec": [1000.0, 500], "max_batch_tokens": 128}
    path.write_text(json.dumps(foreign))
    measured = read_measured_times(path)
    assert measured == MeasuredTimes(target=TimeCurve((8, 16), (0.001, 0.002)), max_tokens=128)
    assert [target_s(StepTimes(measured), 12, c) for c in (0, 5000)] == pytest.approx([0.0015, 0.0015])


GOOD = {
    "sample_batch_tokens": [1, 2],
    "sample_steps_per_sec": [10.0, 5.0],
    "max_batch_tokens": 2,
    "context_len": 8,
    "long_context_len": 16,
    "long_context_steps_per_sec": [9.0, 4.0],
    "sample_draft_requests": [1],
    "sample_draft_seconds": [0.1],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sample_batch_tokens", [1]),  # case J1: what stands for "not measured"
        ("sample_batch_tokens", [2, 1]),
        ("sample_batch_tokens", [1, 1]),
        ("sample_batch_tokens", [0, 1]),
        ("sample_batch_tokens", [True, 2]),
        ("sample_batch_tokens", [1.0, 2.0]),
        ("sample_batch_tokens", "1,2"),
        ("sample_steps_per_sec", [10.0]),
        ("sample_steps_per_sec", [10.0, 0.0]),
        ("sample_steps_per_sec", [10.0, -1.0]),
        ("sample_steps_per_sec", [10.0, math.nan]),
        ("sample_steps_per_sec", [10.0, math.inf]),
        ("sample_steps_per_sec", [10.0, 1e-320]),
        ("sample_steps_per_sec", [10.0, "5"]),
        ("max_batch_tokens", 1),
        ("max_batch_tokens", 2.0),
        ("long_context_len", 8),
        ("long_context_steps_per_sec", [9.0]),
        ("sample_draft_requests", []),
        ("sample_draft_seconds", [0.1, 0.2]),
        ("sample_draft_seconds", None),
    ],
)
def test_a_wrong_value_is_named_with_the_file(tmp_path, key, value):
    path = tmp_path / "sps.json"
    path.write_text(json.dumps({**GOOD, key: value}))
    with pytest.raises(ConfigError, match=rf"{key} \(.*\) in the capacity file .*sps.json must .*; measure again"):
        read_measured_times(path)


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_named(tmp_path, key):
    path = tmp_path / "sps.json"
    path.write_text(json.dumps({k: v for k, v in GOOD.items() if k != key}))
    with pytest.raises(ConfigError, match=f"sps.json has no {key}; measure again"):
        read_measured_times(path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", b"\xff\xfe"])
def test_a_file_that_is_none_is_named(tmp_path, text):
    path = tmp_path / "sps.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"the capacity file .*sps.json .*; measure again"):
        read_measured_times(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"sps.json cannot be read.*; measure again"):
        read_measured_times(tmp_path / "sps.json")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "occupied").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*; choose another folder"):
        write_measured_times(tmp_path / "occupied" / "capacity.json", MEASURED)


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    (tmp_path / "capacity.json" / "inside").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"capacity.json cannot be written: .*; choose another folder"):
        write_measured_times(tmp_path / "capacity.json", MEASURED)
    assert [entry.name for entry in tmp_path.iterdir()] == ["capacity.json"]
