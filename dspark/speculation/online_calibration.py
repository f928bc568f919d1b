"""Calibration of a drafter's confidences while it serves: a logit offset for each position, moved when text drifts.

The evidence is unbiased: position k counts where it was verified and all before it were accepted, and our schedulers
choose what is verified from confidences that do not depend on x_k. Pure policy, NumPy only; K positions, B bins.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dspark.speculation.calibration import NUM_BINS

logger = logging.getLogger(__name__)

MAX_OFFSET = 2.0  # of a logit: what is wrong beyond that is no drift, and not for a running system to explain away
MAX_STEP = 0.25  # of an offset at one look
LOOK_INTERVAL = 64  # rounds between two looks at the evidence
MIN_JUDGED = 200  # proposals before drift can be clear
MIN_POSITION_JUDGED = 100  # proposals before the error of a position is stated
# Drift is clear where offsets raise twice the log likelihood by this (4.5 standard errors, for there are many looks),
# and would change what is stated by this on average, for less is not worth it.
CLEAR_GAIN, CLEAR_CHANGE = 20.0, 0.015
ADAPTING_ROUNDS = 2048  # for which offsets follow the evidence once drift was clear; then they stay
_KEPT_ON_DRIFT = 0.01  # of the evidence from before
_MEMORY_ROUNDS = 4096  # evidence fades with this time constant
# Offsets of positions drift together more than apart: standard deviations 1 and .15 of what is expected.
_SHARED_VARIANCE, _OWN_VARIANCE = 1.0, 0.15**2
# Bins of stated logits, of width 1/4.
_MAX_LOGIT, _BINS_PER_UNIT = 8.0, 4
_NUM_LOGIT_BINS = int(2 * _MAX_LOGIT * _BINS_PER_UNIT)
_STATE_KEY = "offsets"


class OnlineCalibration:
    """Watches how often proposals of one proposer are accepted, and corrects what it states.

    Confidences come and are kept as the proposer states them (`Draft.confidences`): `observe` takes them before
    `adjust`. Offsets change in `observe` alone, which follows verification, so they never depend on a drawn token
    that is still to be judged. Evidence is that of the verifiers in use: `block` accepts more than a head foretells.
    """

    def __init__(self, num_positions: int, *, proposer_name: str = "dspark") -> None:
        """Watch drafts of `num_positions` at most by the proposer of this name; those of others are not judged."""
        assert num_positions >= 1, num_positions
        self.num_positions = num_positions
        self.proposer_name = proposer_name
        prior = np.eye(num_positions) * _OWN_VARIANCE + _SHARED_VARIANCE
        self._precision = np.linalg.inv(prior)
        self.reset()

    def reset(self) -> None:
        """Forget offsets and evidence."""
        self._offsets = [0.0] * self.num_positions
        self._factors = [1.0] * self.num_positions  # exp(offset)
        self._is_neutral = True
        self._num_adapting = 0  # rounds for which offsets still follow
        self._forget(0.0)

    @property
    def offsets(self) -> tuple[float, ...]:
        """The logit offset of each position [K]."""
        return tuple(self._offsets)

    @property
    def is_adapting(self) -> bool:
        """True from when drift was clear until offsets have settled."""
        return self._num_adapting > 0

    def adjust(self, confidences: Sequence[float]) -> list[float]:
        """Return sigmoid(logit(c_k) + offset_k) for the confidences of a draft [k]; 0, 1 and NaN stay."""
        assert len(confidences) <= self.num_positions, (len(confidences), self.num_positions)
        if self._is_neutral:
            return list(confidences)
        # In odds: no logarithm, and exact at 0 and 1.
        return [c * f / (c * f + 1 - c) for c, f in zip(confidences, self._factors, strict=False)]

    def observe(self, confidences: Sequence[float], num_accepted: int, proposer_name: str | None = None) -> None:
        """Take a verified round: what was stated of the verified part [l], and how much of it was accepted.

        `proposer_name` None: the watched proposer's. Rounds with a confidence that is no number in [0, 1] are left out.
        """
        if proposer_name is not None and proposer_name != self.proposer_name:
            return
        assert num_accepted <= len(confidences) <= self.num_positions, (num_accepted, len(confidences))
        judged = confidences[: num_accepted + 1]
        if not judged or not all(0 <= c <= 1 for c in judged):
            return
        for k, c in enumerate(judged):
            logit = math.log(c / (1 - c)) if 0 < c < 1 else (2 * c - 1) * _MAX_LOGIT
            at = min(max(int((logit + _MAX_LOGIT) * _BINS_PER_UNIT), 0), _NUM_LOGIT_BINS - 1)
            self._new.append((k * _NUM_LOGIT_BINS + at, min(max(logit, -_MAX_LOGIT), _MAX_LOGIT), k < num_accepted))
        self._num_new += 1
        if self._num_new >= LOOK_INTERVAL:
            self._look()

    def errors(self) -> list[float | None]:
        """Return the calibration error of each position [K] over 15 bins, of conditional confidences as adjusted now.

        Over the last few thousand rounds, older ones fading; None where fewer than 100 proposals were judged.
        """
        self._fold_in()
        stated = _sigmoid(self._mean_logits() + np.asarray(self._offsets)[:, None])  # [K, B]
        bins = np.minimum((stated * NUM_BINS).astype(int), NUM_BINS - 1)
        result: list[float | None] = []
        for k, num_judged in enumerate(self._counts.sum(1).tolist()):
            gaps = np.bincount(bins[k], weights=self._accepted[k] - self._counts[k] * stated[k], minlength=NUM_BINS)
            result.append(float(np.abs(gaps).sum() / num_judged) if num_judged >= MIN_POSITION_JUDGED else None)
        return result

    def export_state(self) -> dict[str, Any]:
        """Return the offsets as JSON values, for `restore_state` of the same drafter after a restart."""
        return {_STATE_KEY: list(self._offsets)}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Go on from exported offsets, without evidence. An ill-shaped state is ignored, with a warning."""
        offsets = state.get(_STATE_KEY) if isinstance(state, Mapping) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != self.num_positions
            or not all(type(o) in (int, float) and abs(o) <= MAX_OFFSET for o in offsets)
        ):
            logger.warning(
                "the stored calibration (%r) is not %d offsets of at most %g; starting without",
                offsets, self.num_positions, MAX_OFFSET,
            )  # fmt: skip
            return
        self.reset()
        self._set(np.asarray(offsets, dtype=np.float64))

    def _look(self) -> None:
        """Move the offsets if drift is clear, or was lately."""
        num_rounds = self._num_new
        self._fold_in()
        num_judged = self._counts.sum()
        if not self._num_adapting:
            if num_judged < MIN_JUDGED:
                return
            best = self._best_offsets()
            gain, change = 2 * (self._log_likelihood(best) - self._log_likelihood()), self._change(best)
            if gain < CLEAR_GAIN or change < CLEAR_CHANGE:
                return
            logger.info(
                "confidences of %s no longer fit what is accepted (off by %.1f %% on %d proposals); adapting them",
                self.proposer_name, 100 * change, num_judged,
            )  # fmt: skip
            self._num_adapting = ADAPTING_ROUNDS
            # What was seen from the start on is all of one kind; otherwise most of it is from before the drift.
            if self._num_rounds > 8 * LOOK_INTERVAL:
                self._forget(_KEPT_ON_DRIFT)
                return
        self._num_adapting = max(self._num_adapting - num_rounds, 0)
        current = np.asarray(self._offsets)
        step = np.clip(self._best_offsets() - current, -MAX_STEP, MAX_STEP)
        self._set(np.clip(current + step, -MAX_OFFSET, MAX_OFFSET))

    def _set(self, offsets: np.ndarray) -> None:
        self._offsets = offsets.tolist()
        self._factors = np.exp(offsets).tolist()
        self._is_neutral = not offsets.any()

    def _forget(self, kept: float) -> None:
        """Keep this part of the evidence."""
        shape = (self.num_positions, _NUM_LOGIT_BINS)
        if kept == 0:
            self._counts, self._accepted, self._logits = (np.zeros(shape) for _ in range(3))  # [K, B] each
            self._new: list[tuple[int, float, bool]] = []
            self._num_new = 0
            self._num_rounds = 0
        else:
            for evidence in (self._counts, self._accepted, self._logits):
                evidence *= kept

    def _fold_in(self) -> None:
        """Take the new rounds into the evidence, which fades by their number."""
        if not self._num_new:
            return
        fading = math.exp(-self._num_new / _MEMORY_ROUNDS)
        bins, logits, accepted = (np.array(values) for values in zip(*self._new, strict=True))
        size = self._counts.size
        for evidence, weights in ((self._counts, None), (self._logits, logits), (self._accepted, accepted)):
            evidence *= fading
            evidence += np.bincount(bins, weights=weights, minlength=size).reshape(evidence.shape)
        self._num_rounds += self._num_new
        self._new, self._num_new = [], 0

    def _mean_logits(self) -> np.ndarray:  # [K, B] of what was stated; 0 in bins that hold nothing
        return self._logits / np.maximum(self._counts, 1e-300)

    def _best_offsets(self) -> np.ndarray:
        """Return the most likely offsets [K] given the evidence and that positions drift alike, by Newton's method."""
        logits, offsets = self._mean_logits(), np.asarray(self._offsets)
        for _ in range(4):
            stated = _sigmoid(logits + offsets[:, None])
            gradient = (self._accepted - self._counts * stated).sum(1) - self._precision @ offsets
            information = (self._counts * stated * (1 - stated)).sum(1)
            step = np.linalg.solve(np.diag(information) + self._precision, gradient)
            offsets = np.clip(offsets + np.clip(step, -1, 1), -MAX_OFFSET, MAX_OFFSET)
        return offsets

    def _log_likelihood(self, offsets: np.ndarray | None = None) -> float:
        logits = self._mean_logits() + np.asarray(self._offsets if offsets is None else offsets)[:, None]
        return float((self._accepted * logits - self._counts * np.logaddexp(0, logits)).sum())

    def _change(self, offsets: np.ndarray) -> float:
        """Return by how much these offsets would change what is stated, on average over the evidence."""
        logits = self._mean_logits()
        stated, now = (_sigmoid(logits + o[:, None]) for o in (offsets, np.asarray(self._offsets)))
        return float((self._counts * np.abs(stated - now)).sum() / self._counts.sum())


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * logits))
