"""Which requests should join the drafting pass: the set with the highest expected throughput, by forecasts alone.

Nothing is drawn yet, so the search is unrestricted. No torch. Legend: R requests, C of them could gain by joining, G
numbers of joining requests that are tried, N forecast tokens, S survivals told apart, M numbers of verified tokens,
Theta tokens per second of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dspark.speculation.proposal import Forecast

FORECAST_STEPS = 128  # survivals are rounded to: forecasts are rough, and those meant to be equal are so then
MAX_EACH_NUMBER = 6  # so few candidates are tried in every number; of more, these shares and a few special numbers
TRIED_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
MAX_TRIED_TOKENS = 128  # numbers of verified tokens that are tried; of more, so many evenly spaced ones


@dataclass(frozen=True, kw_only=True)
class PassCosts:
    """The next step without drafts, and what drafts add to it."""

    num_tokens_out: int  # tokens that it brings forward anyway, prefilled ones too
    num_other_tokens: int  # tokens of the step that are not drafts
    room: int  # drafted tokens that it can hold
    target_s: Callable[[np.ndarray], np.ndarray]  # [n] tokens of a step -> [n] seconds
    draft_s: Callable[[np.ndarray], np.ndarray]  # [n] requests that join -> [n] seconds of the pass
    fixed_s: float  # what the engine does besides


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The best set of requests to draft for, beside drafting for none."""

    order: list[int]  # indices of the requests that join, largest gain first; empty: none should
    theta: float
    num_tokens: int  # tokens of that step, verified ones included
    plain_theta: float  # of the step without a pass; drafts that cost nothing are in it
    plain_num_tokens: int


def best_joining(request_ids: Sequence[str], forecasts: Sequence[Forecast], costs: PassCosts) -> Joining:
    """Maximise Theta over the number of requests that join and the drafted tokens that are verified.

    Whoever gains more by joining joins first; ties go to the lower request id.
    """
    paid = _Tokens.of([forecast.paid for forecast in forecasts])
    free = _Tokens.of([forecast.free for forecast in forecasts])
    gains = paid.totals - free.totals  # [R]
    by_id = np.array(sorted(range(len(request_ids)), key=request_ids.__getitem__))
    order = by_id[np.argsort(-gains[by_id], kind="stable")][: np.count_nonzero(gains > 0.0)]  # [C]
    tried = _tried_numbers(gains[order])
    counts = _counts(paid, free, order, tried)
    num_drafted = np.linspace(
        0, room := min(int(counts.sum(axis=1).max()), costs.room), min(room, MAX_TRIED_TOKENS) + 1, dtype=np.int64
    )  # [M]
    tokens = costs.num_tokens_out + _most_tokens(counts, num_drafted)
    target_s = costs.target_s(costs.num_other_tokens + num_drafted)
    theta = tokens / (target_s + costs.draft_s(tried)[:, None] + costs.fixed_s)  # [G, M]
    best = theta.argmax(axis=1)
    winner = int(theta.max(axis=1).argmax())
    return Joining(
        order=order[: tried[winner]].tolist(),
        theta=float(theta[winner, best[winner]]),
        num_tokens=costs.num_other_tokens + int(num_drafted[best[winner]]),
        plain_theta=float(theta[0, best[0]]),
        plain_num_tokens=costs.num_other_tokens + int(num_drafted[best[0]]),
    )


@dataclass(frozen=True)
class _Tokens:
    """Forecast tokens of all requests, one draft each."""

    owners: np.ndarray  # [N] whose token it is
    survivals: np.ndarray  # [N] int64 in `FORECAST_STEPS`; 0 for what is no probability
    totals: np.ndarray  # [R] their sum, per request

    @classmethod
    def of(cls, drafts: Sequence[Sequence[float]]) -> _Tokens:
        lengths = list(map(len, drafts))
        if not any(lengths):
            return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(len(drafts)))
        values = np.fromiter(chain.from_iterable(drafts), np.float64, sum(lengths))
        values = np.where(values > 0.0, np.minimum(values, 1.0), 0.0)
        survivals = np.rint(values * FORECAST_STEPS).astype(np.int64)
        owners = np.repeat(np.arange(len(drafts)), lengths)
        return cls(owners, survivals, np.bincount(owners, survivals, len(drafts)))


def _tried_numbers(gains: np.ndarray) -> np.ndarray:
    """Return the numbers of joining requests [G] to try, ascending from 0, for gains [C] in descending order."""
    num = len(gains)
    if num <= MAX_EACH_NUMBER:
        return np.arange(num + 1)
    num_strong = int(np.count_nonzero(gains >= gains[0] / 2))
    return np.array(sorted({0, 1, num_strong, *(round(share * num) for share in TRIED_SHARES)}))


def _counts(paid: _Tokens, free: _Tokens, order: np.ndarray, tried: np.ndarray) -> np.ndarray:
    """Return how many tokens there are of each survival, from 1 downwards [G, S], if so many of `order` join."""
    place = np.full(len(paid.totals), len(order))
    place[order] = np.arange(len(order))
    joins_from = np.searchsorted(tried, place, side="right")  # [R] index of the first number that includes it, or G
    num_rows, num_columns = len(tried), FORECAST_STEPS + 1

    def table(rows: np.ndarray, survivals: np.ndarray) -> np.ndarray:
        size = (num_rows + 1) * num_columns
        return np.bincount(rows * num_columns + survivals, minlength=size).reshape(num_rows + 1, num_columns)

    changes = table(joins_from[paid.owners], paid.survivals)
    if len(free.owners):  # free drafts stand until their requests join
        changes = changes - table(joins_from[free.owners], free.survivals)
        changes[0] += np.bincount(free.survivals, minlength=num_columns)
    return changes[:num_rows, :0:-1].cumsum(axis=0)


def _most_tokens(counts: np.ndarray, num_drafted: np.ndarray) -> np.ndarray:
    """Return the tokens to expect [G, M] of the likeliest so many [M]; of more than there are, none."""
    totals = np.zeros((2, len(counts), FORECAST_STEPS + 1))  # after each survival: tokens verified, and expected
    np.cumsum(counts, axis=1, out=totals[0, :, 1:])
    np.cumsum(counts * (np.arange(FORECAST_STEPS, 0, -1) / FORECAST_STEPS), axis=1, out=totals[1, :, 1:])
    verified, expected = totals
    # Equally likely tokens add up in proportion, so the line between two totals is exact. All rows are looked up at
    # once, one after the other on a common axis.
    starts = np.arange(len(counts))[:, None] * (verified[:, -1].max() + num_drafted[-1] + 1.0)
    at = (num_drafted + starts).ravel()
    tokens = np.interp(at, (verified + starts).ravel(), expected.ravel()).reshape(len(counts), len(num_drafted))
    tokens[num_drafted > verified[:, -1:]] = 0.0
    return tokens
