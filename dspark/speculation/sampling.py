"""From logits to tokens: the distribution a request asks for, and ways to draw from one.

Legend: N rows of logits, M rows of a subset, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.request import SamplingParams

INVALID_TOKEN = -1  # stands for "this row of logits has NaN, +inf or no finite entry"

# A nucleus is looked for among this many largest logits first: of 49152 they take 0.1 and 0.7 ms, a full sort 3.5 ms.
_NUCLEUS_WINDOWS = (128, 4096)
# Keeps a huge temperature finite in float32, where -inf / inf would be NaN.
_MAX_TEMPERATURE = 1e30


def target_probs(
    logits: Tensor,  # [N, V] float32
    params: Sequence[SamplingParams],  # [N]
) -> tuple[Tensor, Tensor]:
    """Return the distribution each row is sampled from [N, V] float32 and whether the row is usable [N] bool.

    Order: temperature, top_k, top_p on the renormalised top-k, min_p relative to the maximum; entries outside the
    support are exactly 0. Greedy rows are one-hot. top_k and top_p keep exactly the smallest set asked for; among
    equal logits at its edge the lowest ids stay, so top_k 1 is greedy. A row with NaN, +inf or no finite logit is not
    usable and its values mean nothing. `logits` is left as it is. Synchronises if a row uses top_k or top_p.
    """
    assert logits.dim() == 2 and logits.dtype == torch.float32, (logits.shape, logits.dtype)
    assert len(params) == logits.shape[0], (len(params), logits.shape)
    maxima = logits.amax(dim=-1, keepdim=True)
    is_usable = maxima.isfinite().squeeze(-1)  # amax hands NaN on
    temperatures = [1.0 if p.is_greedy else min(p.temperature, _MAX_TEMPERATURE) for p in params]
    scaled = logits - maxima  # at most 0, so that no temperature overflows it
    scaled /= torch.tensor(temperatures, dtype=torch.float32, device=logits.device).unsqueeze(-1)

    vocab_size = logits.shape[1]
    filtered = [i for i, p in enumerate(params) if not p.is_greedy and (_is_ranked(p, vocab_size) or p.min_p > 0.0)]
    if len(filtered) == len(params):
        _restrict_(scaled, params)
    elif filtered:
        subset = scaled[filtered]
        _restrict_(subset, [params[i] for i in filtered])
        scaled[filtered] = subset
    greedy = [i for i, p in enumerate(params) if p.is_greedy]
    probs = torch.softmax(scaled, dim=-1)
    if greedy:
        probs[greedy] = torch.nn.functional.one_hot(scaled[greedy].argmax(dim=-1), vocab_size).to(torch.float32)
    return probs, is_usable


def greedy_tokens(logits: Tensor) -> list[int]:
    """Return the argmax of each row of [N, V], the lowest id on ties, `INVALID_TOKEN` for an unusable row.

    Synchronises once.
    """
    maxima, token_ids = logits.max(dim=-1)  # the first maximum; NaN counts as the largest
    return torch.where(maxima.isfinite(), token_ids, INVALID_TOKEN).tolist()


def sample_tokens(
    weights: Tensor,  # [N, V] non-negative, not necessarily normalised
    uniforms: Sequence[float],  # [N] in [0, 1)
) -> list[int]:
    """Draw one token per row by inverting its distribution function in float64; never one of weight 0.

    Synchronises once.
    """
    assert weights.dim() == 2 and len(uniforms) == weights.shape[0], (weights.shape, len(uniforms))
    if not uniforms:
        return []
    # Row by row: a [N, V] float64 buffer falls out of the cache and is three times slower.
    return torch.cat([_invert(row, uniform) for row, uniform in zip(weights, uniforms, strict=True)]).tolist()


def sample_from(weights: Tensor, uniform: float) -> int:
    """Draw one token from weights [V] (see `sample_tokens`). Synchronises."""
    return sample_tokens(weights.unsqueeze(0), [uniform])[0]


def race(probs: Tensor, exponential: np.ndarray) -> int:
    """Draw the token of [V] whose exponential clock of rate p rings first (the Gumbel-max trick). Synchronises.

    Two distributions that race with one noise mostly draw the same token (Daliri et al. 2024).
    """
    assert probs.shape == exponential.shape, (probs.shape, exponential.shape)
    clocks = torch.from_numpy(exponential).to(probs.device)
    # The largest p/e is the smallest e/p, and p = 0 gives 0 instead of a division by zero.
    return int((probs / clocks).argmax())


def mask_token_ids(logits: Tensor, rows: slice, token_ids: Collection[int]) -> None:
    """Make `token_ids` impossible in these rows of [N, V]: writes -inf into the caller's logits."""
    vocab_size = logits.shape[1]
    assert all(0 <= token_id < vocab_size for token_id in token_ids), (token_ids, vocab_size)
    if token_ids:
        logits[rows, torch.tensor(list(token_ids), device=logits.device)] = -math.inf


def _invert(weights: Tensor, uniform: float) -> Tensor:  # [V] -> [1] int64
    cumulative = weights.cumsum(dim=0, dtype=torch.float64)
    total = cumulative[-1:]
    # The first token past the mark has positive weight. A uniform of 53 bits puts the mark below the total in float64,
    # so there always is one.
    return torch.searchsorted(cumulative, total * uniform, right=True)


def _is_ranked(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1.0


def _restrict_(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    """Write -inf outside the support of each row of [M, V] logits that were divided by T and have maximum 0."""
    ranked = [i for i, p in enumerate(params) if _is_ranked(p, scaled.shape[1])]
    if len(ranked) == len(params):
        _keep_largest_(scaled, params)
    elif ranked:
        subset = scaled[ranked]
        _keep_largest_(subset, [params[i] for i in ranked])
        scaled[ranked] = subset
    if any(p.min_p > 0.0 for p in params):
        # p >= min_p * p_max in the logits; restricting the rest first changes no ratio to the maximum
        floors = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
        scaled.masked_fill_(scaled < torch.tensor(floors, device=scaled.device).unsqueeze(-1), -math.inf)


def _keep_largest_(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    """Write -inf over all but the logits that top_k and top_p keep; of equal ones at the edge the lowest ids stay."""
    num_rows, vocab_size = scaled.shape
    limits = torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], device=scaled.device)
    masses = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=scaled.device)
    num_kept = torch.zeros(num_rows, dtype=torch.int64, device=scaled.device)
    edges = torch.zeros(num_rows, 1, dtype=scaled.dtype, device=scaled.device)  # the smallest logit that is kept
    is_tied = torch.zeros(num_rows, dtype=torch.bool, device=scaled.device)  # with one that is not
    pending = torch.arange(num_rows, device=scaled.device)
    for window in _windows(params, vocab_size):
        rows, limit = (scaled, limits) if len(pending) == num_rows else (scaled[pending], limits[pending])
        largest = rows.topk(min(window + 1, vocab_size), dim=-1).values  # [M, window + 1], descending
        count = _num_kept(rows, largest[:, :window], limit, masses[pending])
        is_settled = (limit <= window) | (count <= window)
        settled, last = pending[is_settled], count[is_settled].unsqueeze(-1) - 1
        values = largest[is_settled]
        num_kept[settled] = last.squeeze(-1) + 1
        edges[settled] = values.gather(1, last)
        beyond = values.gather(1, (last + 1).clamp(max=largest.shape[1] - 1))
        is_tied[settled] = (beyond == edges[settled]).squeeze(-1)
        pending = pending[~is_settled]
        if not len(pending):
            break
    scaled.masked_fill_(scaled < edges, -math.inf)
    for row in is_tied.nonzero().squeeze(-1).tolist():  # rare
        is_edge = scaled[row] == edges[row]
        num_edge = num_kept[row] - (scaled[row] > edges[row]).sum()
        scaled[row].masked_fill_(is_edge & (is_edge.cumsum(dim=0) > num_edge), -math.inf)


def _windows(params: Sequence[SamplingParams], vocab_size: int) -> list[int]:
    """Return how many of the largest logits to look at, attempt after attempt."""
    first = max((p.top_k for p in params if 0 < p.top_k < vocab_size), default=0)
    if any(not 0 < p.top_k < vocab_size for p in params):
        first = max(first, _NUCLEUS_WINDOWS[0])
    return [min(first, vocab_size), *(w for w in _NUCLEUS_WINDOWS if first < w < vocab_size), vocab_size]


def _num_kept(scaled: Tensor, largest: Tensor, limits: Tensor, masses: Tensor) -> Tensor:
    """Return how many of each row's largest logits stay [M]: the fewest of the first `limits` that reach the mass.

    Sees the `largest` [M, window]; window + 1 means that these do not reach it.
    """
    window = largest.shape[1]
    weights = largest.exp().double()
    weights.masked_fill_(torch.arange(window, device=scaled.device) >= limits.unsqueeze(-1), 0.0)
    cumulative = weights.cumsum(dim=-1)
    totals = cumulative[:, -1].clone()
    is_open = limits > window  # the mass is that of the whole row
    totals[is_open] = scaled[is_open].exp().sum(dim=-1).double()
    count = (cumulative < (masses * totals).unsqueeze(-1)).sum(dim=-1) + 1
    # top_p = 1 is off: rounding in the sums must not cut the tail
    return torch.where(masses < 1.0, count, limits)
