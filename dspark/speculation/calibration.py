"""Calibration of a drafter's confidences: Sequential Temperature Scaling, and the error it lowers. NumPy only.

A temperature pulls towards 0.5; what is wrong beyond that (an offset, other slopes) a refitted head undoes before.

N rounds, K proposals of a round, S probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.errors import ConfigError

NUM_BINS = 15
NUM_FOLDS = 5  # of texts, to measure what was not fitted to
# 0.25, 0.30 .. 4.00
TEMPERATURES = tuple(round(0.25 + 0.05 * step, 2) for step in range(76))


@dataclass(frozen=True, kw_only=True)
class ReliabilityBin:
    """Tokens whose confidence (or survival) falls into one of 15 equal bins."""

    confidence: float  # mean
    acceptance: float  # mean
    num_slots: int


# Fits the head to the rounds that a mask [N] chooses; returns the confidence logits [N, K] it then gives all rounds.
Refit = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Temperatures of a drafter's confidence logits, and how far survivals were from the truth without and with them.

    Errors are those of the survival a_k = c_1 .. c_k, measured on the rounds that were fitted to; `ece_cross_validated`
    measures each fifth of the texts with what was fitted to the others: temperatures, and the head if it was refitted.
    """

    num_rounds: int
    temperatures: tuple[float, ...]  # [K]
    ece_before: tuple[float, ...]  # [K]
    ece_refitted: tuple[float, ...] | None  # [K] with the refitted head alone; None: it was not refitted
    ece_after: tuple[float, ...]  # [K]
    ece_cross_validated: tuple[float, ...] | None  # [K] None: a single text
    reliability_before: tuple[tuple[ReliabilityBin, ...], ...]  # [K] bins that hold a round
    reliability_refitted: tuple[tuple[ReliabilityBin, ...], ...] | None
    reliability_after: tuple[tuple[ReliabilityBin, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Return what `sts.json` holds of it; a file that other engines read, so the keys are theirs."""
        cross_validated = self.ece_cross_validated
        refitted = {} if self.ece_refitted is None else {"ece_refitted": list(self.ece_refitted)}
        return {
            "temperatures": list(self.temperatures),
            "num_samples": self.num_rounds,
            "ece_before": list(self.ece_before),
            "ece_after": list(self.ece_after),
            "ece_cross_validated": None if cross_validated is None else list(cross_validated),
        } | refitted


def calibrate(
    confidence_logits: np.ndarray, acceptance: np.ndarray, text_ids: np.ndarray, *, refit: Refit | None = None
) -> Calibration:
    """Fit temperatures to rounds [N, K] (as for `fit_temperatures`) of the texts `text_ids` [N], and measure them.

    With `refit` the temperatures are those of the refitted head, which is measured too.
    """
    _check_rounds(confidence_logits, acceptance)
    refitted = None if refit is None else refit(np.ones(len(acceptance), dtype=bool))
    logits = confidence_logits if refitted is None else refitted
    temperatures = fit_temperatures(logits, acceptance)
    ones = np.ones(len(temperatures))
    before, after = survivals(confidence_logits, ones), survivals(logits, temperatures)
    between = None if refitted is None else survivals(refitted, ones)
    return Calibration(
        num_rounds=len(acceptance),
        temperatures=temperatures,
        ece_before=_errors(before, acceptance),
        ece_refitted=None if between is None else _errors(between, acceptance),
        ece_after=_errors(after, acceptance),
        ece_cross_validated=_cross_validated_errors(confidence_logits, acceptance, text_ids, refit),
        reliability_before=_reliability(before, acceptance),
        reliability_refitted=None if between is None else _reliability(between, acceptance),
        reliability_after=_reliability(after, acceptance),
    )


def fit_temperatures(confidence_logits: np.ndarray, acceptance: np.ndarray) -> tuple[float, ...]:
    """Return the temperatures [K] of Sequential Temperature Scaling (the paper's STS).

    From the first proposal to the last, T_k is the value of the grid with the least calibration error of the survival
    a_k = sigmoid(logit_1 / T_1) .. sigmoid(logit_k / T_k), the earlier temperatures fixed; of equal ones the lowest,
    and 1 where no temperature makes a difference.

    confidence_logits [N, K], which may be infinite; acceptance [N, K] says whether proposals 1 .. k were all accepted,
    or how likely that was. Every round must have been judged in full: `ConfigError` for NaN, and for no round at all.
    """
    _check_rounds(confidence_logits, acceptance)
    survival = np.ones(len(acceptance))
    temperatures = []
    for logits, accepted in zip(confidence_logits.T, acceptance.T, strict=True):
        errors = [calibration_error(survival * _sigmoid(logits / t), accepted) for t in TEMPERATURES]
        # Nothing is to be learned from proposals that are certain, or never reached: the grid's first value would say
        # something all the same.
        is_flat = max(errors) - min(errors) < 1e-12
        temperature = 1.0 if is_flat else TEMPERATURES[int(np.argmin(errors))]
        survival = survival * _sigmoid(logits / temperature)
        temperatures.append(temperature)
    return tuple(temperatures)


def survivals(confidence_logits: np.ndarray, temperatures: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return a_1 .. a_K [N, K], the chances that proposals 1 .. k are all accepted, from logits [N, K]."""
    return np.cumprod(_sigmoid(confidence_logits / np.asarray(temperatures)), axis=1)


def reliability_bins(confidence: np.ndarray, acceptance: np.ndarray) -> tuple[ReliabilityBin, ...]:
    """Return the mean confidence and acceptance rate [S] in those of 15 equal bins that hold any."""
    bins = _bins(confidence)
    num_slots = np.bincount(bins, minlength=NUM_BINS)
    sums = [np.bincount(bins, weights=values, minlength=NUM_BINS) for values in (confidence, acceptance)]
    return tuple(
        ReliabilityBin(confidence=float(c / n), acceptance=float(a / n), num_slots=int(n))
        for c, a, n in zip(*sums, num_slots, strict=True)
        if n
    )


def calibration_error(confidence: np.ndarray, acceptance: np.ndarray) -> float:
    """Return the mean gap between confidence and acceptance rate [S] over 15 equal bins (ECE); S is at least 1."""
    gaps = np.bincount(_bins(confidence), weights=acceptance - confidence, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def _bins(confidence: np.ndarray) -> np.ndarray:
    return np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * logits))  # never overflows, exact at infinity


def _check_rounds(confidence_logits: np.ndarray, acceptance: np.ndarray) -> None:
    assert confidence_logits.shape == acceptance.shape and acceptance.ndim == 2, (
        confidence_logits.shape,
        acceptance.shape,
    )
    if not len(acceptance):
        raise ConfigError("there are 0 rounds to calibrate with; use more or longer texts")
    num_cut = int((np.isnan(confidence_logits) | np.isnan(acceptance)).any(axis=1).sum())
    if num_cut:
        raise ConfigError(
            f"{num_cut} of {len(acceptance)} rounds were not judged in full (NaN): what was cut off depends on the "
            "confidences that are to be calibrated; give rounds whose every proposal was verified"
        )


def _errors(survival: np.ndarray, acceptance: np.ndarray) -> tuple[float, ...]:
    return tuple(calibration_error(a, accepted) for a, accepted in zip(survival.T, acceptance.T, strict=True))


def _reliability(survival: np.ndarray, acceptance: np.ndarray) -> tuple[tuple[ReliabilityBin, ...], ...]:
    return tuple(reliability_bins(a, accepted) for a, accepted in zip(survival.T, acceptance.T, strict=True))


def _cross_validated_errors(
    confidence_logits: np.ndarray, acceptance: np.ndarray, text_ids: np.ndarray, refit: Refit | None
) -> tuple[float, ...] | None:
    """Return the errors [K] of survivals that come from what was fitted to the other texts; None for a single text."""
    folds = folds_of(text_ids)
    if folds.max() == 0:
        return None
    survival = np.empty(confidence_logits.shape)
    for fold in range(folds.max() + 1):
        own = folds == fold
        logits = confidence_logits if refit is None else refit(~own)
        survival[own] = survivals(logits[own], fit_temperatures(logits[~own], acceptance[~own]))
    return _errors(survival, acceptance)


def folds_of(text_ids: np.ndarray) -> np.ndarray:
    """Return the fold [N] of each round, 0 to at most 4: rounds of one text are alike, so they are in one."""
    return np.unique(text_ids, return_inverse=True)[1] % NUM_FOLDS
