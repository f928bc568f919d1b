"""Offsets that follow drift, stay where there is none, and rest on unbiased evidence alone (case J11)."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest

from dspark.speculation.calibration import calibration_error
from dspark.speculation.online_calibration import (
    ADAPTING_ROUNDS,
    LOOK_INTERVAL,
    MAX_OFFSET,
    MAX_STEP,
    OnlineCalibration,
)

NUM_POSITIONS = 5


def sigmoid(logits: Any) -> Any:
    return 1 / (1 + np.exp(-logits))


def serve(calibration: OnlineCalibration, num_rounds: int, *, drift: float, seed: int, limit: int = 5) -> None:
    """Observe rounds whose head states sigmoid(z) of what is accepted with sigmoid(z + drift), independently."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.5, 1.2, (num_rounds, NUM_POSITIONS))
    misses = rng.random(logits.shape) >= sigmoid(logits + drift)
    accepted = np.where(misses.any(1), misses.argmax(1), NUM_POSITIONS)
    for stated, count in zip(sigmoid(logits).tolist(), accepted.tolist(), strict=True):
        calibration.observe(stated[:limit], min(count, limit))


def true_errors(calibration: OnlineCalibration, *, drift: float) -> list[float]:
    """Return the error of adjusted confidences at each position, against 100,000 true chances."""
    logits = np.random.default_rng(99).normal(0.5, 1.2, 100_000)
    return [calibration_error(sigmoid(logits + o), sigmoid(logits + drift)) for o in calibration.offsets]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_head_that_is_too_sure_by_one_logit_is_corrected_within_2000_rounds(seed: int) -> None:
    calibration = OnlineCalibration(NUM_POSITIONS)
    assert min(true_errors(calibration, drift=-1)) > 0.17
    serve(calibration, 2000, drift=-1, seed=seed)
    assert max(true_errors(calibration, drift=-1)) < 0.03
    errors = calibration.errors()
    assert errors[0] is not None and errors[0] < 0.04  # measured on these rounds


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_calibrated_head_is_left_alone(seed: int) -> None:
    calibration = OnlineCalibration(NUM_POSITIONS)
    serve(calibration, 20_000, drift=0, seed=seed)
    assert calibration.offsets == (0,) * NUM_POSITIONS
    assert not calibration.is_adapting


def test_drift_after_a_long_calm_is_followed_and_settles() -> None:
    calibration = OnlineCalibration(NUM_POSITIONS)
    serve(calibration, 20_000, drift=0, seed=5)
    serve(calibration, 1000, drift=-1, seed=6)
    assert calibration.is_adapting
    serve(calibration, ADAPTING_ROUNDS, drift=-1, seed=7)
    assert not calibration.is_adapting
    assert max(true_errors(calibration, drift=-1)) < 0.03
    settled = calibration.offsets
    serve(calibration, 2000, drift=-1, seed=8)
    assert calibration.offsets == settled


def test_positions_that_are_hardly_ever_reached_follow_the_others() -> None:
    """Drafts of two at most: the later positions have no evidence of their own."""
    calibration = OnlineCalibration(NUM_POSITIONS)
    serve(calibration, 2000, drift=-1, seed=1, limit=2)
    assert calibration.offsets[2:] == pytest.approx([np.mean(calibration.offsets[:2])] * 3, abs=0.1)
    assert calibration.errors()[2:] == [None] * 3


def test_drift_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    serve(OnlineCalibration(NUM_POSITIONS), 3000, drift=-1, seed=0)
    assert len(caplog.messages) == 1
    assert "confidences of dspark no longer fit what is accepted" in caplog.messages[0]


def test_steps_and_offsets_are_bounded() -> None:
    """Stated .99, never accepted."""
    calibration = OnlineCalibration(NUM_POSITIONS)
    seen = [0.0]
    for _ in range(40):
        for _ in range(LOOK_INTERVAL):
            calibration.observe([0.99] * NUM_POSITIONS, 0)
        seen.append(calibration.offsets[0])
    assert max(abs(np.diff(seen))) <= MAX_STEP + 1e-12
    assert seen[-1] == -MAX_OFFSET
    assert min(calibration.offsets) == -MAX_OFFSET


def test_a_position_is_judged_only_where_all_before_were_accepted() -> None:
    """Position 2 behind a rejection tells nothing, whatever was stated of it."""
    calibrations = [OnlineCalibration(2), OnlineCalibration(2)]
    for later, calibration in zip((0.01, 0.99), calibrations, strict=True):
        for number in range(1000):
            calibration.observe([0.9, later if number % 2 else 0.5], 0 if number % 2 else 2)
    assert calibrations[0].offsets == calibrations[1].offsets
    assert calibrations[0].offsets[0] < -0.5
    assert calibrations[0].errors() == calibrations[1].errors()


def test_little_evidence_moves_nothing() -> None:
    calibration = OnlineCalibration(NUM_POSITIONS)
    for _ in range(3 * LOOK_INTERVAL):
        calibration.observe([0.99], 0)
    assert calibration.offsets == (0,) * NUM_POSITIONS


def test_other_proposers_and_confidences_that_are_no_chances_are_not_judged() -> None:
    calibration = OnlineCalibration(1)
    for _ in range(1000):
        calibration.observe([0.99], 0, "ngram")
        calibration.observe([float("nan")], 0)
        calibration.observe([1.5], 0)
        calibration.observe([], 0)
    assert calibration.offsets == (0,)
    assert calibration.errors() == [None]


def test_certain_confidences_are_evidence_too() -> None:
    """Half of what is stated as 1 fails: the error is one half."""
    calibration = OnlineCalibration(1)
    for number in range(150):
        calibration.observe([1.0], number % 2)
    assert calibration.errors() == [pytest.approx(0.5, abs=0.01)]


def test_logits_are_shifted() -> None:
    calibration = OnlineCalibration(3)
    calibration.restore_state({"offsets": [1.0, -0.5, 0.0]})
    adjusted = calibration.adjust([0.7, 0.2, 0.4])
    assert adjusted == pytest.approx([sigmoid(np.log(0.7 / 0.3) + 1), sigmoid(np.log(0.2 / 0.8) - 0.5), 0.4])
    assert calibration.adjust([0.0, 1.0]) == [0, 1]
    assert np.isnan(calibration.adjust([float("nan")])[0])
    assert calibration.adjust([]) == []
    order = [calibration.adjust([c])[0] for c in np.linspace(0, 1, 50).tolist()]
    assert (np.diff(order) > 0).all()


def test_without_drift_confidences_stay_bit_for_bit() -> None:
    stated = [0.1, 1 / 3, 0.7]
    adjusted = OnlineCalibration(3).adjust(stated)
    assert adjusted == stated
    assert adjusted is not stated


def test_offsets_survive_a_restart_as_json() -> None:
    calibration = OnlineCalibration(NUM_POSITIONS)
    serve(calibration, 2000, drift=-1, seed=0)
    restored = OnlineCalibration(NUM_POSITIONS)
    restored.restore_state(json.loads(json.dumps(calibration.export_state())))
    assert restored.offsets == calibration.offsets
    assert restored.adjust([0.5] * 5) == calibration.adjust([0.5] * 5)


@pytest.mark.parametrize(
    "state", [{}, {"offsets": [0.1]}, {"offsets": [0, 9]}, {"offsets": [0, float("nan")]}, {"offsets": "ab"}, []]
)
def test_an_ill_shaped_state_is_ignored_with_a_warning(state: Any, caplog: pytest.LogCaptureFixture) -> None:
    calibration = OnlineCalibration(2)
    calibration.restore_state({"offsets": [0.5, 0.5]})
    calibration.restore_state(state)
    assert calibration.offsets == (0.5, 0.5)
    assert "is not 2 offsets of at most 2" in caplog.text


def test_reset_forgets_everything() -> None:
    calibration = OnlineCalibration(NUM_POSITIONS)
    serve(calibration, 2000, drift=-1, seed=0)
    calibration.reset()
    assert calibration.offsets == (0,) * NUM_POSITIONS
    assert not calibration.is_adapting
    assert calibration.errors() == [None] * NUM_POSITIONS
    assert calibration.adjust([0.3]) == [0.3]
