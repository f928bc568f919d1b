"""Sequential Temperature Scaling: stored numbers, a head known to be overconfident, and values at the edge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.errors import ConfigError
from dspark.speculation.calibration import (
    TEMPERATURES,
    calibrate,
    calibration_error,
    fit_temperatures,
    folds_of,
    reliability_bins,
    survivals,
)

FIXTURE = Path(__file__).parents[1] / "fixtures" / "algorithms" / "sequential_temperature_scaling.json"
INFINITE = float("inf")


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FIXTURE.read_text())
    return content


def accepted(lengths: list[int], num_proposals: int) -> np.ndarray:
    """Return whether proposals 1 .. k were accepted [N, K]."""
    return (np.arange(num_proposals) < np.array(lengths)[:, None]).astype(float)


def column(*values: float) -> np.ndarray:
    return np.array(values)[:, None]


def test_the_grid_is_the_stored_one(stored: dict[str, Any]) -> None:
    assert list(TEMPERATURES) == stored["grid"]


def test_stored_rounds_give_the_stored_temperatures_and_errors(stored: dict[str, Any]) -> None:
    lengths = stored["accepted_lengths"]
    fitted = calibrate(np.array(stored["confidence_logits"]), accepted(lengths, 7), np.arange(len(lengths)))
    assert list(fitted.temperatures) == stored["temperatures"]
    assert fitted.ece_before == pytest.approx(stored["ece_before"], abs=1e-4)
    assert fitted.ece_after == pytest.approx(stored["ece_after"], abs=1e-4)
    assert fitted.num_rounds == 2000


def test_the_error_curve_of_the_second_position_is_the_stored_one(stored: dict[str, Any]) -> None:
    """With the first temperature frozen."""
    logits, survived = np.array(stored["confidence_logits"])[:, :2], accepted(stored["accepted_lengths"], 7)[:, 1]
    curve = [calibration_error(survivals(logits, [stored["temperatures"][0], t])[:, 1], survived) for t in TEMPERATURES]
    assert curve == pytest.approx(stored["ece_curve"][1], abs=1e-4)


def test_a_head_that_doubles_its_logits_is_found_out() -> None:
    """Case J11: true conditionals sigmoid(z / 2), the head says sigmoid(z); acceptance given as it is likely."""
    logits = np.random.default_rng(5).normal(1.5, 2, (20_000, 5))
    true = 1 / (1 + np.exp(-logits / 2))
    coins = np.random.default_rng(6).random(logits.shape) < true
    reached = np.cumprod(np.concatenate([np.ones((len(coins), 1)), coins[:, :-1]], axis=1), axis=1)
    fitted = calibrate(logits, reached * true, np.arange(len(logits)))
    assert fitted.temperatures == pytest.approx([2] * 5, abs=0.15)
    assert max(fitted.ece_after) < 0.01 < min(fitted.ece_before)
    assert fitted.ece_cross_validated is not None
    assert max(fitted.ece_cross_validated) < 0.01


def test_the_order_of_confidences_in_a_position_stays() -> None:
    """Case J11."""
    logits = np.linspace(-6, 6, 50)[:, None]
    assert (np.diff(survivals(logits, [3.95])[:, 0]) > 0).all()


def test_survivals_are_running_products_of_conditional_confidences() -> None:
    """Case J4: sigmoid(ln 4) = .8, with temperature 2 sigmoid(ln 2) = 2/3."""
    logits = np.log([[4.0, 4.0, 1.0]])
    assert survivals(logits, [1, 2, 1]) == pytest.approx(np.array([[0.8, 0.8 * 2 / 3, 0.4 * 2 / 3]]))


def test_rounds_that_were_cut_are_refused() -> None:
    """Case J11: a block trimmed by its confidences says nothing of what was cut off."""
    whole = np.ones((3, 2))
    cut = np.array([[1.0, 1.0], [1.0, np.nan], [0.0, 0.0]])
    with pytest.raises(ConfigError, match=r"1 of 3 rounds were not judged in full"):
        fit_temperatures(whole, cut)
    with pytest.raises(ConfigError, match=r"1 of 3 rounds were not judged in full"):
        fit_temperatures(cut, whole)


def test_no_round_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="there are 0 rounds to calibrate with"):
        fit_temperatures(np.empty((0, 7)), np.empty((0, 7)))


def test_a_single_round_gives_temperatures_of_the_grid_and_nothing_to_check_them_with() -> None:
    fitted = calibrate(np.array([[2.0, -2.0]]), np.array([[1.0, 1.0]]), np.array([0]))
    assert fitted.temperatures == (0.25, 4.0)
    assert fitted.ece_cross_validated is None


def test_constant_confidences_come_to_state_the_rate() -> None:
    """Logit ln 9 says .9, the rate is 3/4 = sigmoid(ln 3): temperature 2."""
    assert fit_temperatures(column(*[np.log(9)] * 4), column(1, 1, 1, 0)) == (2.0,)


@pytest.mark.filterwarnings("error")
def test_confidences_of_zero_and_one_are_taken_as_certain() -> None:
    logits = np.array([[INFINITE, INFINITE], [-INFINITE, 1.0], [INFINITE, -INFINITE]])
    fitted = calibrate(logits, np.array([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]), np.arange(3))
    assert fitted.temperatures == (1.0, 1.0)  # no temperature changes them
    assert fitted.ece_after == (0.0, 0.0)
    assert survivals(logits, [2.0, 2.0]).tolist() == [[1, 1], [0, 0], [1, 0]]


def test_a_position_that_no_round_can_reach_keeps_temperature_one() -> None:
    logits = np.array([[-INFINITE, 2.0], [-INFINITE, -1.0]])
    assert fit_temperatures(logits, np.zeros((2, 2))) == (1.0, 1.0)


def test_a_position_at_which_nothing_is_accepted_is_made_as_unsure_as_the_grid_allows() -> None:
    assert fit_temperatures(column(2.0, 3.0), column(0, 0)) == (4.0,)


def test_errors_are_checked_with_what_the_other_texts_say() -> None:
    """Text 0 accepts nothing, the two others all: 0 is judged by temperature .25, the others by one that suits both."""
    logits, rates, texts = column(1, 1, 1), column(0, 1, 1), np.array([0, 1, 2])
    fitted = calibrate(logits, rates, texts)
    low, high = 1 / (1 + np.exp(-1 / 4)), 1 / (1 + np.exp(-1 / 0.25))
    assert fit_temperatures(logits[:2], rates[:2]) == (4.0,)  # one of two
    assert fitted.ece_cross_validated == pytest.approx([(high + 2 * (1 - low)) / 3])


def test_a_text_is_in_one_of_five_folds_as_a_whole() -> None:
    assert folds_of(np.array([7, 7, 3, 9, 9, 11, 12, 20, 3])).tolist() == [1, 1, 0, 2, 2, 3, 4, 0, 0]


def test_a_refitted_head_is_measured_alone_with_temperatures_and_on_texts_it_did_not_see() -> None:
    """The head says .9 of what is accepted half the time; each refit states the rate of the rounds it is given."""
    rates = column(1, 0, 1, 0, 1, 1)
    texts = np.array([0, 0, 1, 1, 2, 2])
    seen: list[list[bool]] = []

    def refit(rows: np.ndarray) -> np.ndarray:
        seen.append(rows.tolist())
        rate = rates[rows].mean()
        return np.full((6, 1), np.log(rate / (1 - rate)))

    fitted = calibrate(np.full((6, 1), np.log(9)), rates, texts, refit=refit)
    assert seen == [[True] * 6, *([[t != fold for t in texts] for fold in range(3)])]
    assert fitted.ece_before == pytest.approx([0.9 - 4 / 6])
    assert fitted.ece_refitted == pytest.approx([0], abs=1e-12)
    assert fitted.reliability_refitted is not None
    assert [one.confidence for one in fitted.reliability_refitted[0]] == pytest.approx([4 / 6])
    assert fitted.temperatures == (1.0,)
    assert fitted.ece_cross_validated == pytest.approx([(2 * 0.25 + 2 * 0.25 + 2 * 0.5) / 6])
    assert fitted.to_json()["ece_refitted"] == pytest.approx([0], abs=1e-12)


def test_calibration_error_is_the_mean_gap_of_bins() -> None:
    confidence = np.array([0.05, 0.05, 0.95, 0.95])
    acceptance = np.array([0.0, 0.3, 0.95, 0.75])
    bins = reliability_bins(confidence, acceptance)
    assert [(one.confidence, one.acceptance, one.num_slots) for one in bins] == [
        (pytest.approx(0.05), pytest.approx(0.15), 2),
        (pytest.approx(0.95), pytest.approx(0.85), 2),
    ]
    assert calibration_error(confidence, acceptance) == pytest.approx(0.5 * 0.1 + 0.5 * 0.1)


def test_a_confidence_of_one_is_in_the_last_bin() -> None:
    assert calibration_error(np.array([1.0, 0.99]), np.array([0.99, 1.0])) == pytest.approx(0)


def test_the_file_holds_the_keys_that_other_engines_read() -> None:
    content = calibrate(column(1, 1), column(1, 0), np.array([0, 1])).to_json()
    assert {"temperatures", "num_samples", "ece_before", "ece_after"} <= content.keys()
    assert content["num_samples"] == 2
    assert json.loads(json.dumps(content)) == content
