"""The ragged batch that one forward pass takes: [T, ...] tensors plus cu_seqlens, no padding.

T tokens in the flattened batch, R rows (one request each), P pages of the longest row, N rows of logits wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """The tokens of one request in a step: `token_ids` stand at `start_position`, `start_position + 1`, ..."""

    token_ids: Sequence[int]
    start_position: int  # tokens before it already have KV in the pages
    page_ids: Sequence[int]  # page table; covers start_position + len(token_ids) positions
    num_logits: int = 0  # logits are wanted for this many of the last tokens


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """Input of one target (or draft model) forward pass. Build it with `build_forward_batch`."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, page_id * page_size + position % page_size
    logits_indices: Tensor  # [N] int64, rows of [T] whose logits are wanted
    query_lens: tuple[int, ...]  # [R] tokens of each row
    context_lens: tuple[int, ...]  # [R] keys each row may see, its own tokens included
    page_tables: tuple[np.ndarray, ...]  # [R] arrays of int64 page ids, just covering context_lens
    page_size: int

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @cached_property
    def cu_seqlens(self) -> Tensor:  # [R+1] int32, on the device of the batch
        offsets = np.concatenate(([0], np.cumsum(self.query_lens))).astype(np.int32)
        return torch.from_numpy(offsets).to(self.input_ids.device)


def build_forward_batch(
    rows: Sequence[BatchRow], *, page_size: int, device: torch.device | str = "cpu"
) -> ForwardBatch:
    """Flatten `rows` into one ragged batch on `device`."""
    assert rows, "a forward pass needs at least one row"
    token_ids: list[int] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    logits_indices: list[int] = []
    page_tables: list[np.ndarray] = []
    for row in rows:
        num_tokens = len(row.token_ids)
        end = row.start_position + num_tokens
        num_pages = -(-end // page_size)
        assert num_tokens > 0 and len(row.page_ids) >= num_pages, (num_tokens, end, len(row.page_ids))
        pages = np.asarray(row.page_ids[:num_pages], dtype=np.int64)
        row_positions = np.arange(row.start_position, end, dtype=np.int64)
        token_ids.extend(row.token_ids)
        positions.append(row_positions)
        slots.append(pages[row_positions // page_size] * page_size + row_positions % page_size)
        logits_indices.extend(range(len(token_ids) - row.num_logits, len(token_ids)))
        page_tables.append(pages)
    return ForwardBatch(
        input_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
        logits_indices=torch.tensor(logits_indices, dtype=torch.int64, device=device),
        query_lens=tuple(len(row.token_ids) for row in rows),
        context_lens=tuple(row.start_position + len(row.token_ids) for row in rows),
        page_tables=tuple(page_tables),
        page_size=page_size,
    )
