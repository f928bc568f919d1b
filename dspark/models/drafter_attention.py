"""Attention of drafted blocks: each sees its request's context in the pages, and itself; nothing enters the pages.

R requests, B slots of a block, L gathered context positions of the longest row, H query heads, KVH key heads,
G = H / KVH, Dh head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.models.attention_buckets import BUCKET_OVERHEAD_ELEMENTS, MAX_BUCKET_ELEMENTS, partition_rows
from dspark.models.drafter_config import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class DraftRow:
    """One request that wants a block."""

    anchor_token_id: int
    anchor_position: int  # its context is what stands in the pages at positions 0 .. anchor_position - 1
    page_ids: Sequence[int]  # page table; covers the context, and has at least one page


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Rows attended together, padded to the longest context."""

    row_indices: Tensor | None  # [r]; None: all rows in order
    num_rows: int
    page_indices: Tensor  # [r * P] the last pages of each row only make room for the block
    num_context: int  # L, whole pages
    mask: Tensor  # [r, 1, G * B, L + B] 0 or -inf


class BlockAttention:
    """Plans and attends blocks of one drafter; keeps the memory that pages are gathered into."""

    def __init__(self, config: DrafterConfig) -> None:
        self.config = config
        self._scratch: Tensor | None = None

    def plan(self, rows: Sequence[DraftRow], *, page_size: int, dtype: torch.dtype, device: torch.device) -> BlockPlan:
        """Return what the layers need to attend the blocks of `rows`. One plan is in use at a time."""
        return BlockPlan(self, rows, page_size, dtype, device)

    def scratch(self, num_elements: int, like: Tensor) -> Tensor:
        """Return memory for `num_elements` of the type and device of `like`; the next call may return it again."""
        if self._scratch is None or self._scratch.numel() < num_elements or self._scratch.dtype != like.dtype:
            with torch.inference_mode(False):  # ordinary memory, so that callers may mix inference_mode and no_grad
                self._scratch = torch.empty(num_elements, dtype=like.dtype, device=like.device)
        return self._scratch[:num_elements]


class BlockPlan:
    """What all layers of one drafting pass share."""

    def __init__(
        self,
        attention: BlockAttention,
        rows: Sequence[DraftRow],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._attention = attention
        self._rows = rows
        self._page_size = page_size
        self._dtype = dtype
        self._device = device
        self._longest = max(row.anchor_position for row in rows)
        self._groups: dict[tuple[int | None, bool], list[_Group]] = {}

    def attend(
        self, queries: Tensor, keys_values: Tensor, pool: Tensor, *, window: int | None, is_causal: bool
    ) -> Tensor:
        """Attend one layer.

        queries [R, B, H, Dh] and keys_values [R, B, 2, KVH, Dh] of the blocks; pool [pages, page_size, 2, KVH, Dh] of
        the context, of which every slot sees the last `window` positions before the anchor. Returns [R, B, H, Dh].
        """
        if window is not None and window >= self._longest:
            window = None  # sees everything, so that layers with and without a window share their groups
        key = (window, is_causal)
        if key not in self._groups:
            self._groups[key] = self._make_groups(window, is_causal)
        groups = self._groups[key]
        if len(groups) == 1:
            return self._attend_group(groups[0], queries, keys_values, pool)
        output = torch.empty_like(queries)
        for group in groups:
            assert group.row_indices is not None, "several groups cannot each hold all rows"
            rows = group.row_indices
            output[rows] = self._attend_group(group, queries[rows], keys_values[rows], pool)
        return output

    def _attend_group(self, group: _Group, queries: Tensor, keys_values: Tensor, pool: Tensor) -> Tensor:
        page_shape = pool.shape[1:]
        scratch = self._attention.scratch(group.page_indices.shape[0] * page_shape.numel(), pool)
        pages = torch.index_select(pool, 0, group.page_indices, out=scratch.view(-1, *page_shape))
        gathered = pages.view(group.num_rows, -1, *page_shape[1:])  # [r, P * page_size, 2, KVH, Dh]
        end = group.num_context + keys_values.shape[1]
        gathered[:, group.num_context : end] = keys_values
        keys, values = gathered[:, :end].permute(2, 0, 3, 1, 4)  # [r, KVH, L + B, Dh] each
        heads = (keys.shape[1], queries.shape[2] // keys.shape[1])
        packed = queries.unflatten(2, heads).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [r, KVH, G * B, Dh]
        output = F.scaled_dot_product_attention(packed, keys, values, attn_mask=group.mask)
        return output.unflatten(2, (heads[1], -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _make_groups(self, window: int | None, is_causal: bool) -> list[_Group]:
        config, page_size = self._attention.config, self._page_size
        first_pages = [0 if window is None else max(0, row.anchor_position - window) // page_size for row in self._rows]
        num_pages = [-(-row.anchor_position // page_size) for row in self._rows]
        elements_per_token = config.num_kv_heads * config.head_dim
        partition = partition_rows(
            [config.block_size] * len(self._rows),
            [(last - first) * page_size for first, last in zip(first_pages, num_pages, strict=True)],
            overhead_tokens=BUCKET_OVERHEAD_ELEMENTS / elements_per_token,
            max_tokens=MAX_BUCKET_ELEMENTS / elements_per_token,
        )
        return [self._make_group(members, first_pages, num_pages, window, is_causal) for members in partition]

    def _make_group(
        self, members: list[int], first_pages: list[int], num_pages: list[int], window: int | None, is_causal: bool
    ) -> _Group:
        config, page_size = self._attention.config, self._page_size
        num_context_pages = max(num_pages[i] - first_pages[i] for i in members)
        num_block_pages = -(-config.block_size // page_size)
        pages = np.empty((len(members), num_context_pages + num_block_pages), dtype=np.int64)
        for place, i in enumerate(members):
            own = self._rows[i].page_ids[first_pages[i] : num_pages[i]]
            pages[place, : len(own)] = own
            pages[place, len(own) :] = self._rows[i].page_ids[0]  # padding reads the row's own pages
        positions = np.arange(num_context_pages * page_size)[None] + page_size * np.array(first_pages)[members, None]
        anchors = np.array([self._rows[i].anchor_position for i in members])[:, None]
        sees_context = positions < anchors  # [r, L]
        if window is not None:
            sees_context &= positions >= anchors - window
        size = config.block_size
        sees_block = np.tri(size, dtype=bool) if is_causal else np.ones((size, size), dtype=bool)
        allowed = np.concatenate(
            [
                np.broadcast_to(sees_context[:, None], (len(members), size, sees_context.shape[1])),
                np.broadcast_to(sees_block, (len(members), size, size)),
            ],
            axis=2,
        )
        allowed = np.tile(allowed, (1, config.num_heads // config.num_kv_heads, 1))
        mask = torch.from_numpy(np.where(allowed, np.float32(0), np.float32(-np.inf)))
        is_whole = members == list(range(len(self._rows)))
        return _Group(
            row_indices=None if is_whole else torch.tensor(members, device=self._device),
            num_rows=len(members),
            page_indices=torch.from_numpy(pages.reshape(-1)).to(self._device),
            num_context=num_context_pages * page_size,
            mask=mask.to(device=self._device, dtype=self._dtype).unsqueeze(1),
        )
