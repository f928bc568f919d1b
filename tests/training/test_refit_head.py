"""A confidence head that followed its training text, fitted anew: what it finds, leaves alone, and needs."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.errors import ConfigError
from dspark.models.drafter_calibration import ConfidenceHead
from dspark.speculation.calibration import calibrate
from dspark.training.refit_head import HeadRefit

NUM_ROUNDS, NUM_POSITIONS, NUM_INPUTS, NUM_TEXTS = 3000, 3, 8, 30
ALL = np.ones(NUM_ROUNDS, dtype=bool)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def make_refit(head: np.ndarray, bias: float, truth: np.ndarray, true_bias: float) -> HeadRefit:
    """Return rounds in which proposals are accepted as `truth` says, while the head states another thing."""
    rng = np.random.default_rng(3)
    inputs = rng.normal(1, 2, (NUM_ROUNDS, NUM_POSITIONS, NUM_INPUTS)).astype(np.float32)
    chances = sigmoid(inputs @ truth + true_bias)
    misses = rng.random(chances.shape) >= chances
    num_accepted = np.where(misses.any(1), misses.argmax(1), NUM_POSITIONS)
    is_reached = np.arange(NUM_POSITIONS) <= num_accepted[:, None]
    return HeadRefit(
        confidence_logits=inputs @ head + bias,
        inputs=inputs,
        acceptance=np.where(is_reached, chances, 0.0),
        num_accepted=num_accepted,
        text_ids=np.arange(NUM_ROUNDS) * NUM_TEXTS // NUM_ROUNDS,
    )


TRUTH = np.array([0.5, -0.3, 0.2, 0.0, 0.4, 0.0, -0.2, 0.1])


def test_offset_and_scale_alone_are_undone_exactly() -> None:
    """The head states twice the true logit plus 1: z' = z / 2 - 1 / 2, and the weights only follow the scale."""
    refit = make_refit(2 * TRUTH, 1.0, TRUTH, 0.0)
    change = refit.change(ALL)
    assert change.penalty == float("inf")
    assert change.weights.tolist() == [0] * NUM_INPUTS
    assert (1 + change.scale, change.offset) == (pytest.approx(0.5, abs=1e-3), pytest.approx(-0.5, abs=1e-3))
    head = change.head(ConfidenceHead(weights=2 * TRUTH, bias=1.0))
    assert head.weights == pytest.approx(TRUTH, abs=5e-3)
    assert head.bias == pytest.approx(0, abs=5e-3)
    assert change.to_json() == {"scale": 1 + change.scale, "offset": change.offset, "penalty": None}


def test_wrong_slopes_are_corrected_where_texts_agree_on_it() -> None:
    """Two inputs say the opposite of the truth: no temperature and no offset undoes it."""
    wrong = TRUTH * np.array([-1, 1, 1, 1, -1, 1, 1, 1])
    refit = make_refit(wrong, 0.5, TRUTH, -0.2)
    change = refit.change(ALL)
    assert np.isfinite(change.penalty)
    rounds = (refit.confidence_logits, refit.acceptance, refit.text_ids)
    alone, refitted = calibrate(*rounds), calibrate(*rounds, refit=refit)
    assert alone.ece_cross_validated is not None and refitted.ece_cross_validated is not None
    assert alone.ece_cross_validated[0] > 0.05
    assert max(refitted.ece_cross_validated) < 0.03


def test_the_refitted_head_gives_the_refitted_logits() -> None:
    refit = make_refit(TRUTH[::-1].copy(), 0.5, TRUTH, -0.2)
    head = refit.change(ALL).head(ConfidenceHead(weights=TRUTH[::-1].copy(), bias=0.5))
    np.testing.assert_allclose(refit.inputs @ head.weights + head.bias, refit(ALL), atol=1e-4)


def test_proposals_behind_a_rejection_are_no_evidence() -> None:
    """Whatever the head read there."""
    refit = make_refit(2 * TRUTH, 1.0, TRUTH, 0.0)
    is_behind = np.arange(NUM_POSITIONS) > refit.num_accepted[:, None]
    expected = refit.change(ALL)
    inputs = np.where(is_behind[..., None], np.float32(50), refit.inputs)
    logits = np.where(is_behind, 50.0, refit.confidence_logits)
    other = HeadRefit(
        confidence_logits=logits,
        inputs=inputs,
        acceptance=refit.acceptance,
        num_accepted=refit.num_accepted,
        text_ids=refit.text_ids,
    ).change(ALL)
    assert (other.scale, other.offset) == (expected.scale, expected.offset)


def test_only_chosen_rounds_are_fitted_to() -> None:
    refit = make_refit(2 * TRUTH, 1.0, TRUTH, 0.0)
    chosen = refit.text_ids < 20
    contradicted = HeadRefit(
        confidence_logits=refit.confidence_logits,
        inputs=refit.inputs,
        acceptance=np.where(chosen[:, None], refit.acceptance, 1 - refit.acceptance),
        num_accepted=refit.num_accepted,
        text_ids=refit.text_ids,
    )
    assert refit(chosen).tolist() == contradicted(chosen).tolist()


def test_a_head_that_says_the_same_everywhere_gets_the_rate() -> None:
    """Inputs without spread; 1 of 2 is accepted where .9 was stated."""
    rates = np.tile([[0.25], [0.75]], (50, 1))
    refit = HeadRefit(
        confidence_logits=np.full((100, 1), np.log(9)),
        inputs=np.ones((100, 1, 4), dtype=np.float32),
        acceptance=rates,
        num_accepted=np.zeros(100, dtype=int),
        text_ids=np.arange(100) // 10,
    )
    assert sigmoid(refit(np.ones(100, dtype=bool))) == pytest.approx(np.full((100, 1), 0.5), abs=1e-3)


def test_few_texts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"9 texts are too few to refit a head to, which takes 10"):
        HeadRefit(
            confidence_logits=np.zeros((9, 1)),
            inputs=np.zeros((9, 1, 2), dtype=np.float32),
            acceptance=np.zeros((9, 1)),
            num_accepted=np.zeros(9, dtype=int),
            text_ids=np.arange(9),
        )
