"""Which conversations a step takes and how fast it learns: functions of the step, so that resuming needs no state."""

from __future__ import annotations

import math

import numpy as np


def num_steps(num_conversations: int, *, batch_size: int, num_epochs: float, max_steps: int | None) -> int:
    """Return the length of a run in steps."""
    return max_steps if max_steps is not None else max(1, math.ceil(num_epochs * num_conversations / batch_size))


def items_of_step(step: int, num_conversations: int, *, batch_size: int, seed: int) -> list[tuple[int, int]]:
    """Return the (epoch, place among the training conversations) of each item of `step`, counted from 0.

    Each epoch takes every conversation once, in an order of its own; a step may reach into the next one.
    """
    items: list[tuple[int, int]] = []
    orders: dict[int, np.ndarray] = {}
    for number in range(step * batch_size, (step + 1) * batch_size):
        epoch, place = divmod(number, num_conversations)
        if epoch not in orders:
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(num_conversations)
        items.append((epoch, int(orders[epoch][place])))
    return items


def learning_rate(step: int, total: int, *, peak: float, warmup_fraction: float) -> float:
    """Return the rate of `step`, counted from 0: a linear rise over the first steps, then half a cosine to zero."""
    warmup = math.ceil(warmup_fraction * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))
