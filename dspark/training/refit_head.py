"""A confidence head fitted anew to rounds on held-out texts, after its drafter was trained.

A head learns beside a drafter that is better on the training text than elsewhere, so it is too sure of itself, and its
weights follow that text. Logistic regression corrects it: offset and scale of its logit are free, its weights are
held by an L2 penalty, whose strength the texts themselves choose. N rounds, K proposals, F inputs, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from dspark.errors import ConfigError
from dspark.models.drafter_calibration import ConfidenceHead
from dspark.speculation.calibration import NUM_FOLDS, folds_of

# Of the weights in units of an input's standard deviation, against the summed log loss; the first leaves them alone.
PENALTIES = (float("inf"), 100_000.0, 30_000.0, 10_000.0, 3_000.0, 1_000.0, 300.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class HeadChange:
    """What turns a head's logit z of inputs x into the refitted one: (1 + scale) z + offset + weights . x."""

    scale: float
    offset: float
    weights: np.ndarray  # [F]
    penalty: float  # that was chosen

    def logits(self, confidence_logits: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        """Return the refitted logits [...] of logits [...] and inputs [..., F]."""
        return (1 + self.scale) * confidence_logits + self.offset + inputs @ self.weights.astype(inputs.dtype)

    def head(self, old: ConfidenceHead) -> ConfidenceHead:
        """Return the refitted head."""
        scale = 1 + self.scale
        return ConfidenceHead(weights=scale * old.weights + self.weights, bias=scale * old.bias + self.offset)

    def to_json(self) -> dict[str, float | None]:
        """Return what to record of it; the penalty is None where the weights were only scaled."""
        return {
            "scale": 1 + self.scale,
            "offset": self.offset,
            "penalty": self.penalty if np.isfinite(self.penalty) else None,
        }


@dataclass(frozen=True, kw_only=True)
class HeadRefit:
    """Fits the head to chosen rounds (a `calibration.Refit`), and keeps the fit to all of them."""

    confidence_logits: np.ndarray  # [N, K]
    inputs: np.ndarray  # [N, K, F] what the head read
    acceptance: np.ndarray  # [N, K] as in `Rounds`
    num_accepted: np.ndarray  # [N]
    text_ids: np.ndarray  # [N]
    _changes: dict[bytes, HeadChange] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_texts = len(np.unique(self.text_ids))
        if num_texts < 2 * NUM_FOLDS:
            raise ConfigError(
                f"{num_texts} texts are too few to refit a head to, which takes {2 * NUM_FOLDS}; use more texts or "
                "leave --refit-head out"
            )

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Return the logits [N, K] of all rounds by a head fitted to the rounds of the mask `rows` [N]."""
        return self.change(rows).logits(self.confidence_logits, self.inputs)

    def change(self, rows: np.ndarray) -> HeadChange:
        """Return the change that the rounds of the mask `rows` [N] ask for; the same mask is fitted once."""
        key = rows.tobytes()
        if key not in self._changes:
            self._changes[key] = self._fit(rows)
        return self._changes[key]

    def _fit(self, rows: np.ndarray) -> HeadChange:
        # What a proposal behind a rejection would have met is not known, nor does the head speak of it.
        is_judged = np.arange(self.acceptance.shape[1]) <= self.num_accepted[rows, None]
        slots = _Slots(
            logits=self.confidence_logits[rows][is_judged],
            inputs=self.inputs[rows][is_judged],
            labels=np.clip(self.acceptance[rows][is_judged], 0, 1),
        )
        texts = np.broadcast_to(self.text_ids[rows, None], is_judged.shape)[is_judged]
        penalty = _choose_penalty(slots, texts)
        # Down the path, so that this fit is the one that was compared.
        return next(change for change in _path(slots) if change.penalty == penalty)


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """Proposals whose predecessors were all accepted."""

    logits: np.ndarray  # [S]
    inputs: np.ndarray  # [S, F]
    labels: np.ndarray  # [S] how likely the proposal was to be accepted

    def chosen(self, mask: np.ndarray) -> _Slots:
        return _Slots(logits=self.logits[mask], inputs=self.inputs[mask], labels=self.labels[mask])


def _choose_penalty(slots: _Slots, texts: np.ndarray) -> float:
    """Return the strongest penalty whose cross-validated loss is within a standard error of the least one.

    Texts are what is independent: folds and the standard error are theirs.
    """
    folds, text = folds_of(texts), np.unique(texts, return_inverse=True)[1]
    masks = [folds == fold for fold in range(folds.max() + 1)]
    paths = zip(*(_path(slots.chosen(~own)) for own in masks), strict=True)
    losses: list[np.ndarray] = []  # [texts] of each penalty
    for changes in paths:
        loss = np.empty(len(texts))
        for own, change in zip(masks, changes, strict=True):
            logits = change.logits(slots.logits[own], slots.inputs[own])
            loss[own] = np.logaddexp(0, logits) - slots.labels[own] * logits
        losses.append(np.bincount(text, weights=loss))
        if len(losses) > 1 and losses[-1].sum() > losses[-2].sum():
            break  # weaker ones follow the chance of the texts even more
    by_text = np.stack(losses)  # [penalties, texts]
    best = by_text[by_text.sum(1).argmin()]
    excess = by_text - best
    centred = excess - excess.mean(1, keepdims=True)
    errors = np.sqrt((centred**2).sum(1))  # of the sum over texts
    return next(p for p, e, error in zip(PENALTIES, excess.sum(1), errors, strict=False) if e <= error)


def _path(slots: _Slots) -> Iterator[HeadChange]:
    """Fit with each penalty, from the strongest down, each from where the last one ended."""
    mean, spread = slots.inputs.mean(0, dtype=np.float64), slots.inputs.std(0, dtype=np.float64)
    spread = np.where(spread > 0, spread, 1.0)
    inputs = torch.from_numpy(((slots.inputs - mean) / spread).astype(np.float32))  # the large part
    logits, labels = (torch.from_numpy(values.astype(np.float64)) for values in (slots.logits, slots.labels))
    # Scale and offset before the weights. Logits are centred, so that the two do not pull at each other.
    centre = float(logits.mean())
    values = torch.zeros(2 + inputs.shape[1], dtype=torch.float64)
    for penalty in PENALTIES:
        values = _minimum(values, logits, centre, inputs, labels, penalty)
        fitted = values.numpy()
        weights = fitted[2:] / spread
        offset = fitted[1] - fitted[0] * centre - weights @ mean
        yield HeadChange(scale=float(fitted[0]), offset=float(offset), weights=weights, penalty=penalty)


def _minimum(
    start: torch.Tensor, logits: torch.Tensor, centre: float, inputs: torch.Tensor, labels: torch.Tensor, penalty: float
) -> torch.Tensor:
    """Return scale, offset and weights [2 + F] of the least penalised log loss: a convex problem."""
    values = start.clone().requires_grad_(True)
    moves_weights = np.isfinite(penalty)
    optimizer = torch.optim.LBFGS([values], max_iter=300, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        refitted = logits + values[0] * (logits - centre) + values[1]
        if moves_weights:
            refitted = refitted + (inputs @ values[2:].float()).double()
        loss = F.binary_cross_entropy_with_logits(refitted, labels, reduction="sum")
        # Next to nothing, but a head that says the same everywhere, or is never wrong, has no other least loss.
        loss = loss + 0.5e-3 * values[:2].square().sum()
        if moves_weights:
            loss = loss + 0.5 * penalty * values[2:].square().sum()
        loss = loss / len(labels)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return values.detach()
