"""Ragged rows grouped into few padded buckets, each of which is one gather of pages and one attention call.

R rows of a bucket, Q queries of its longest row, L keys of its longest row (whole pages), H query heads,
KVH key heads, G = H / KVH, Dh head dimension. The choice of buckets is plain arithmetic on lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.batch import ForwardBatch

# Rows with more queries than this (prefill chunks) fill the machine alone; padding them together only wastes work.
MAX_SHARED_QUERIES = 16
# Up to this many queries the G heads of a key head are laid out as more query rows: their keys are read once.
MAX_PACKED_QUERIES = 64
# What one more bucket costs per layer, in gathered key elements (tokens x KVH x Dh) that take as long.
BUCKET_OVERHEAD_ELEMENTS = 45_000
# Gathered keys and values should still be in the cache when attention reads them.
MAX_BUCKET_ELEMENTS = 800_000


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Rows that are attended together, padded to the longest of them."""

    num_rows: int
    num_queries: int  # Q
    token_indices: Tensor | None  # [R * Q] their places in the batch; None: the whole batch in order
    page_range: tuple[int, int] | None  # pages that lie side by side in the pool need no gather
    page_indices: Tensor  # [R * pages of the longest row]
    key_range: tuple[int, int]  # gathered keys that count; narrower than the pages only for a single row
    mask: Tensor | None  # [R, 1, Q, L] or packed [R, 1, G * Q, L]: 0 or -inf; None: every key counts
    is_packed: bool


@dataclass(frozen=True, kw_only=True)
class BucketedBatch:
    """The buckets of one batch for one window, and the way back to the order of the batch."""

    buckets: list[Bucket]
    output_indices: Tensor | None  # [T] places of the batch's tokens in the concatenated buckets; None: in order


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One row of the batch as its window sees it."""

    token_start: int  # its first token's place in the batch
    query_len: int
    context_len: int
    key_start: int  # absolute position of the first gathered key, a page border
    pages: np.ndarray

    @property
    def num_keys(self) -> int:
        return self.context_len - self.key_start


def partition_rows(
    query_lens: Sequence[int], key_lens: Sequence[int], *, overhead_tokens: float, max_tokens: float
) -> list[list[int]]:
    """Return groups of row numbers whose padded cost together is low.

    A group costs `overhead_tokens` plus rows x longest keys x a weight that grows with the most queries; groups of
    several rows stay under `max_tokens` padded keys. Exact over contiguous groups of two orders (by queries, by keys).
    """
    alone = [[row] for row, query_len in enumerate(query_lens) if query_len > MAX_SHARED_QUERIES]
    shared = [row for row, query_len in enumerate(query_lens) if query_len <= MAX_SHARED_QUERIES]
    if not shared:
        return alone
    orders = (
        sorted(shared, key=lambda row: (query_lens[row], key_lens[row])),
        sorted(shared, key=lambda row: (key_lens[row], query_lens[row])),
    )
    plans = [_partition_in_order(order, query_lens, key_lens, overhead_tokens, max_tokens) for order in orders]
    _, groups = min(plans, key=lambda plan: plan[0])
    return alone + [sorted(group) for group in groups]


def _partition_in_order(
    order: list[int], query_lens: Sequence[int], key_lens: Sequence[int], overhead: float, limit: float
) -> tuple[float, list[list[int]]]:
    costs, cuts = [0.0], [0]
    for end in range(1, len(order) + 1):
        best, cut, most_keys, most_queries = float("inf"), end - 1, 0, 0
        for start in range(end - 1, -1, -1):
            row = order[start]
            most_keys = max(most_keys, key_lens[row])
            most_queries = max(most_queries, query_lens[row])
            padded = (end - start) * most_keys
            if padded > limit and start < end - 1:
                break
            cost = costs[start] + overhead + padded * (0.9 + 0.115 * most_queries)  # weights measured on CPU
            if cost < best:
                best, cut = cost, start
        costs.append(best)
        cuts.append(cut)
    groups = []
    end = len(order)
    while end:
        groups.append(order[cuts[end] : end])
        end = cuts[end]
    return costs[-1], groups[::-1]


def bucket_batch(
    batch: ForwardBatch, *, window: int | None, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> BucketedBatch:
    """Group the rows of `batch` for layers that see `window` keys (None: all) and lay out their pages and masks."""
    rows = _rows_of(batch, window)
    elements_per_token = num_kv_heads * head_dim
    groups = partition_rows(
        [row.query_len for row in rows],
        [len(row.pages) * batch.page_size for row in rows],
        overhead_tokens=BUCKET_OVERHEAD_ELEMENTS / elements_per_token,
        max_tokens=MAX_BUCKET_ELEMENTS / elements_per_token,
    )
    token_indices = [_token_indices([rows[i] for i in group]) for group in groups]
    device = batch.input_ids.device
    group_size = num_heads // num_kv_heads
    buckets = [
        _bucket_of([rows[i] for i in group], indices, batch, window=window, group_size=group_size, dtype=dtype)
        for group, indices in zip(groups, token_indices, strict=True)
    ]
    flat = np.concatenate(token_indices)
    if len(flat) == batch.num_tokens and (np.diff(flat) == 1).all():
        return BucketedBatch(buckets=buckets, output_indices=None)
    places = np.empty(batch.num_tokens, dtype=np.int64)
    places[flat] = np.arange(len(flat))  # a padded query repeats its row's last token: any of its places will do
    return BucketedBatch(buckets=buckets, output_indices=torch.from_numpy(places).to(device))


def _rows_of(batch: ForwardBatch, window: int | None) -> list[_Row]:
    rows = []
    token_start = 0
    for query_len, context_len, pages in zip(batch.query_lens, batch.context_lens, batch.page_tables, strict=True):
        first_key = 0 if window is None else max(0, context_len - query_len - window + 1)
        first_page = first_key // batch.page_size
        rows.append(
            _Row(
                token_start=token_start,
                query_len=query_len,
                context_len=context_len,
                key_start=first_page * batch.page_size,
                pages=pages[first_page:],
            )
        )
        token_start += query_len
    return rows


def _token_indices(rows: list[_Row]) -> np.ndarray:  # [R * Q]
    most_queries = max(row.query_len for row in rows)
    offsets = np.arange(most_queries)
    return np.concatenate([row.token_start + np.minimum(offsets, row.query_len - 1) for row in rows])


def _bucket_of(
    rows: list[_Row],
    token_indices: np.ndarray,
    batch: ForwardBatch,
    *,
    window: int | None,
    group_size: int,
    dtype: torch.dtype,
) -> Bucket:
    device = batch.input_ids.device
    num_queries = len(token_indices) // len(rows)
    is_packed = 1 < num_queries <= MAX_PACKED_QUERIES
    most_pages = max(len(row.pages) for row in rows)
    pages = np.empty((len(rows), most_pages), dtype=np.int64)
    for i, row in enumerate(rows):
        pages[i, : len(row.pages)] = row.pages
        pages[i, len(row.pages) :] = row.pages[0]  # padding reads the row's own pages, never a neighbour's
    flat_pages = pages.reshape(-1)
    is_contiguous = len(rows) == 1 and bool((np.diff(flat_pages) == 1).all())
    key_range = (0, most_pages * batch.page_size)
    mask: Tensor | None = None
    if len(rows) == 1 and num_queries == 1:  # one query sees a plain range of keys
        row = rows[0]
        first_key = 0 if window is None else max(0, row.context_len - window)
        key_range = (first_key - row.key_start, row.num_keys)
    else:
        allowed = _allowed_keys(rows, num_queries, key_range[1], window)
        if is_packed:
            allowed = np.tile(allowed, (1, group_size, 1))
        additive = np.where(allowed, np.float32(0), np.float32(-np.inf))
        mask = torch.from_numpy(additive).to(device=device, dtype=dtype).unsqueeze(1)
    is_whole_batch = len(token_indices) == batch.num_tokens and bool((np.diff(token_indices) == 1).all())
    return Bucket(
        num_rows=len(rows),
        num_queries=num_queries,
        token_indices=None if is_whole_batch else torch.from_numpy(token_indices).to(device),
        page_range=(int(flat_pages[0]), int(flat_pages[-1]) + 1) if is_contiguous else None,
        page_indices=torch.from_numpy(flat_pages).to(device),
        key_range=key_range,
        mask=mask,
        is_packed=is_packed,
    )


def _allowed_keys(rows: list[_Row], num_queries: int, num_keys: int, window: int | None) -> np.ndarray:  # [R, Q, L]
    query_lens = np.array([row.query_len for row in rows])[:, None]
    context_lens = np.array([row.context_len for row in rows])[:, None]
    key_starts = np.array([row.key_start for row in rows])[:, None]
    queries = context_lens - query_lens + np.minimum(np.arange(num_queries)[None], query_lens - 1)
    keys = (key_starts + np.arange(num_keys)[None])[:, None, :]
    allowed = keys <= queries[:, :, None]
    if window is not None:
        allowed &= keys > queries[:, :, None] - window
    return allowed


def attend_bucket(
    bucket: Bucket, queries: Tensor, pool: Tensor, scratch: Tensor | None, *, scale: float, softcap: float | None
) -> Tensor:
    """Attend one bucket of one layer.

    queries [T, H, Dh]; pool [pages, page_size, 2, KVH, Dh]; `scratch` receives the gathered pages (unused when the
    bucket has a `page_range`). Returns [R * Q, H, Dh].
    """
    if bucket.token_indices is not None:
        queries = queries.index_select(0, bucket.token_indices)
    if bucket.page_range is not None:
        pages = pool[bucket.page_range[0] : bucket.page_range[1]]
    else:
        assert scratch is not None, "a bucket whose pages are scattered needs room for them"
        pages = torch.index_select(pool, 0, bucket.page_indices, out=scratch)
    first_key, last_key = bucket.key_range
    keys_values = pages.view(bucket.num_rows, -1, *pages.shape[2:])[:, first_key:last_key]
    keys, values = keys_values.permute(2, 0, 3, 1, 4)  # [R, KVH, L, Dh] each
    num_heads, head_dim = queries.shape[1:]
    queries = queries.unflatten(0, (bucket.num_rows, bucket.num_queries))  # [R, Q, H, Dh]
    if not bucket.is_packed:
        output = _attend(queries.transpose(1, 2), keys, values, bucket.mask, scale, softcap)
        return output.transpose(1, 2).reshape(-1, num_heads, head_dim)
    heads = (keys.shape[1], num_heads // keys.shape[1])
    packed = queries.unflatten(2, heads).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [R, KVH, G * Q, Dh]
    output = _attend(packed, keys, values, bucket.mask, scale, softcap)
    output = output.unflatten(2, (heads[1], bucket.num_queries))  # [R, KVH, G, Q, Dh]
    return output.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_dim)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Attend queries [R, n, q, Dh] to keys and values [R, KVH, L, Dh], n a multiple of KVH; returns like queries."""
    if softcap is None:
        enable_gqa = queries.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    num_groups = queries.shape[1] // keys.shape[1]
    grouped = queries.unflatten(1, (-1, num_groups)).flatten(2, 3)  # [R, KVH, n / KVH * q, Dh]
    scores = torch.matmul(grouped, keys.transpose(-1, -2)).float()
    scores = scores.mul_(scale / softcap).tanh_().mul_(softcap)
    scores = scores.unflatten(2, (num_groups, -1))
    if mask is not None:
        scores = scores + mask.unsqueeze(2)
    probs = torch.softmax(scores, dim=-1).to(queries.dtype).flatten(2, 3)
    return torch.matmul(probs, values).unflatten(2, (num_groups, -1)).flatten(1, 2)
