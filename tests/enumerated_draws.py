"""Integrates a verification exactly over chance, instead of sampling it: every coin both ways, every drawn token."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.request import SamplingParams
from dspark.speculation.logit_processing import logit_processor
from dspark.speculation.proposal import Draft
from dspark.speculation.verification import Pick, VerificationResult, VerificationRow, verify_batch

Rows = Callable[[tuple[int, ...]], np.ndarray]  # prefix of drafted tokens -> [V] values of the next position


class EnumeratedDraws:
    """Flips coins by a script, then lets them succeed; keeps their probabilities and the weights of the last token."""

    def __init__(self, script: Sequence[bool] = ()) -> None:
        self._script = script
        self.flips: list[bool] = []
        self.flip_probs: list[float] = []
        self.last_token_probs: np.ndarray | None = None
        self.picks: list[Pick] = []

    def is_accepted(self, row: VerificationRow, position: int, probability: float) -> bool:
        flip = self._script[len(self.flips)] if len(self.flips) < len(self._script) else True
        self.flips.append(flip)
        self.flip_probs.append(min(1.0, probability))
        return flip

    def pick_tokens(self, picks: Sequence[Pick], weights: Tensor) -> list[int]:
        assert len(picks) == 1, picks
        self.picks.extend(picks)
        values = weights[0].double().numpy()
        self.last_token_probs = values / values.sum()
        return [int(values.argmax())]

    def race_token(self, row: VerificationRow, position: int, probs: Tensor) -> int:
        raise AssertionError("the law of a race is that of its clocks; there is no coin to enumerate")

    @property
    def probability(self) -> float:
        sides = zip(self.flips, self.flip_probs, strict=True)
        return float(np.prod([p if flip else 1.0 - p for flip, p in sides]))


def outcomes(verify: Callable[[EnumeratedDraws], VerificationResult]) -> Iterator[tuple[float, int, np.ndarray]]:
    """Yield (probability, accepted length, distribution of the last token) for every way the coins can fall."""
    scripts: list[tuple[bool, ...]] = [()]
    while scripts:
        script = scripts.pop()
        draws = EnumeratedDraws(script)
        result = verify(draws)
        scripts.extend((*draws.flips[:i], False) for i in range(len(script), len(draws.flips)))
        if draws.probability > 0.0:
            assert result.error is None and draws.last_token_probs is not None, result
            yield draws.probability, result.num_accepted, draws.last_token_probs


def verification_law(
    target_logits: Rows,
    draft_probs: Rows,
    *,
    length: int,
    method: str,
    sampling: SamplingParams | None = None,
    is_deterministic: bool = False,
    prompt: Sequence[int] = (0,),
) -> tuple[np.ndarray, dict[tuple[int, ...], float]]:
    """Return the exact law of the accepted length [length + 1], and of the emitted prefixes.

    Drafts are drawn from `draft_probs`, position after position; with `is_deterministic` these are one-hot and the
    draft is passed without probabilities.
    """
    vocab_size = len(target_logits(()))
    accepted = np.zeros(length + 1)
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    for drafted in itertools.product(range(vocab_size), repeat=length):
        q = [draft_probs(drafted[:i]) for i in range(length)]
        draft_probability = float(np.prod([row[x] for row, x in zip(q, drafted, strict=True)]))
        if draft_probability == 0.0:
            continue
        logits = np.stack([target_logits(drafted[:i]) for i in range(length + 1)])
        probs = torch.tensor(np.stack(q), dtype=torch.float32) if length and not is_deterministic else None
        row = VerificationRow(
            draft=Draft(token_ids=list(drafted), probs=probs),
            sampling=sampling or SamplingParams(),
            seed=0,
            method=method,
            anchor_position=len(prompt) - 1,
            logit_processor=logit_processor(sampling or SamplingParams(), prompt_token_ids=prompt),
        )

        def verify(draws, logits=logits, row=row):  # type: ignore[no-untyped-def]
            return verify_batch(torch.tensor(logits, dtype=torch.float32), [row], draws=draws)[0]

        for probability, num_accepted, last in outcomes(verify):
            accepted[num_accepted] += draft_probability * probability
            for token_id, p in enumerate(last):
                emitted[(*drafted[:num_accepted], token_id)] += draft_probability * probability * p
    return accepted, dict(emitted)


def completed(emitted: dict[tuple[int, ...], float], target_probs: Rows, *, length: int) -> np.ndarray:
    """Return the joint law [V, ..., V] of `length` tokens when the target itself goes on after each emitted prefix."""
    vocab_size = len(target_probs(()))
    law = np.zeros((vocab_size,) * length)
    for prefix, probability in emitted.items():
        if probability > 0.0:
            law[prefix] += probability * joint(target_probs, prefix, length=length)
    return law


def joint(target_probs: Rows, prefix: tuple[int, ...], *, length: int) -> np.ndarray:
    """Return the target's own joint law of the tokens after `prefix`, up to `length` in all."""
    if len(prefix) == length:
        return np.ones(())
    p = target_probs(prefix)
    return np.stack([p[x] * joint(target_probs, (*prefix, x), length=length) for x in range(len(p))])
