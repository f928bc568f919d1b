"""Ragged paged attention behind one object: a plan made once per batch, then one call per layer.

T tokens in the flattened batch, R rows, H query heads, KVH key heads, Dh head dimension. Which kernel runs depends on
the device and is nobody else's business; `reference_attention` is the plain definition that all of them must equal.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dspark.batch import BatchRow, ForwardBatch, build_forward_batch
from dspark.models.attention_buckets import BucketedBatch, attend_bucket, bucket_batch
from dspark.models.kernels import LANES, can_run
from dspark.models.model_config import DecoderConfig


def reference_attention(
    queries: Tensor, pool: Tensor, batch: ForwardBatch, *, window: int | None, scale: float, softcap: float | None
) -> Tensor:
    """Attend row by row and head by head, the slow and obvious way.

    queries [T, H, Dh]; pool [pages, page_size, 2, KVH, Dh] holding the keys and values of every position up to
    `context_lens`. Query i of a row stands at position context_len - query_len + i and sees the keys up to its own
    position, the last `window` of them if given. Returns [T, H, Dh].
    """
    outputs = torch.empty_like(queries)
    group_size = queries.shape[1] // pool.shape[3]
    token = 0
    for query_len, context_len, pages in zip(batch.query_lens, batch.context_lens, batch.page_tables, strict=True):
        context = pool[torch.from_numpy(pages).to(pool.device)].flatten(0, 1)[:context_len].float()
        keys, values = context.unbind(1)  # [context_len, KVH, Dh] each
        for position in range(context_len - query_len, context_len):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(queries.shape[1]):
                visible = slice(first, position + 1)
                scores = keys[visible, head // group_size] @ queries[token, head].float() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                probs = torch.softmax(scores, dim=0)
                outputs[token, head] = (probs @ values[visible, head // group_size]).to(queries.dtype)
            token += 1
    return outputs


class AttentionPlan:
    """What all layers of one forward pass share. Made by `PagedAttention.plan`."""

    def __init__(self, attention: PagedAttention, batch: ForwardBatch) -> None:
        self._attention = attention
        self._batch = batch
        self._longest = max(batch.context_lens)
        self._bucketed: dict[int | None, tuple[BucketedBatch, list[Tensor | None]]] = {}

    def attend(self, queries: Tensor, pool: Tensor, *, window: int | None) -> Tensor:
        """Attend `queries` [T, H, Dh] of one layer to its `pool` [pages, page_size, 2, KVH, Dh]; returns [T, H, Dh]."""
        if window is not None and window >= self._longest:
            window = None  # sees everything, so that layers with and without a window share their buckets
        if self._attention.uses_varlen(pool):
            return self._attend_varlen(queries, pool, window)
        if window not in self._bucketed:
            self._bucketed[window] = self._attention.bucket(self._batch, pool, window)
        bucketed, scratches = self._bucketed[window]
        config = self._attention.config
        outputs = [
            attend_bucket(
                bucket, queries, pool, scratch, scale=config.attention_scale, softcap=config.attention_softcap
            )
            for bucket, scratch in zip(bucketed.buckets, scratches, strict=True)
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if bucketed.output_indices is None:
            return output
        return output.index_select(0, bucketed.output_indices)

    @property
    def has_kernel(self) -> bool:
        """Whether `rotate_and_attend` serves this batch."""
        return self._attention.has_kernel(self._batch.input_ids.device)

    def rotate_and_attend(self, qkv: Tensor, phases: Tensor, pool: Tensor, *, window: int | None) -> Tensor:
        """Rotate queries and keys, write keys and values to `pool`, attend; returns [T, H * Dh].

        qkv [T, (H + 2 * KVH) * Dh] contiguous float32, changed in place; phases [T, 1, Dh / 2] complex; float32 pool.
        """
        batch, config = self._batch, self._attention.config
        phases = torch.view_as_real(phases)
        torch.ops.dspark.rotate_and_store(qkv, phases, pool, batch.slot_mapping, config.num_heads)
        pages, page_starts = self._flat_pages
        attended: Tensor = torch.ops.dspark.attention(
            qkv,
            pool,
            pages,
            page_starts,
            batch.positions,
            config.num_heads,
            window or 0,
            config.attention_scale,
            config.attention_softcap or 0.0,
        )
        return attended

    @cached_property
    def _flat_pages(self) -> tuple[Tensor, Tensor]:
        """The page tables of all rows [P] int64, one after the other, and where each token's begins [T] int64."""
        tables = self._batch.page_tables
        starts = np.cumsum([0, *(len(table) for table in tables[:-1])])
        per_token = np.repeat(starts, self._batch.query_lens).astype(np.int64)
        return torch.from_numpy(np.concatenate(tables)), torch.from_numpy(per_token)

    def _attend_varlen(self, queries: Tensor, pool: Tensor, window: int | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        block_table, context_lens = self._varlen_tables
        keys, values = pool.unbind(2)
        output = varlen_attn(
            queries,
            keys,
            values,
            self._batch.cu_seqlens,
            None,
            max(self._batch.query_lens),
            self._longest,
            scale=self._attention.config.attention_scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
            seqused_k=context_lens,
            block_table=block_table,
        )
        assert isinstance(output, Tensor)
        return output

    @cached_property
    def _varlen_tables(self) -> tuple[Tensor, Tensor]:
        """The page tables [R, P] int32, padded, and the context lengths [R] int32, on the batch's device."""
        tables = self._batch.page_tables
        padded = np.zeros((len(tables), max(len(table) for table in tables)), dtype=np.int32)
        for row, table in enumerate(tables):
            padded[row, : len(table)] = table
        device = self._batch.input_ids.device
        context_lens = torch.tensor(self._batch.context_lens, dtype=torch.int32, device=device)
        return torch.from_numpy(padded).to(device), context_lens


class PagedAttention:
    """The attention of one decoder; keeps the scratch memory that its plans gather pages into."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self._scratch: Tensor | None = None
        self._varlen_support: dict[tuple[torch.device, torch.dtype, int], bool] = {}

    def plan(self, batch: ForwardBatch) -> AttentionPlan:
        """Return what the layers need to attend `batch`. One plan is in use at a time."""
        return AttentionPlan(self, batch)

    def bucket(
        self, batch: ForwardBatch, pool: Tensor, window: int | None
    ) -> tuple[BucketedBatch, list[Tensor | None]]:
        """Return the buckets of `batch` for `window` and, for each, the scratch memory its pages are gathered into."""
        config = self.config
        bucketed = bucket_batch(
            batch,
            window=window,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=pool.dtype,
        )
        # All buckets use the same memory one after the other: fresh memory costs page faults, and this stays cached.
        page_shape = pool.shape[1:]
        sizes = [b.page_indices.shape[0] * page_shape.numel() if b.page_range is None else 0 for b in bucketed.buckets]
        if self._scratch is None or self._scratch.numel() < max(sizes) or self._scratch.dtype != pool.dtype:
            # Ordinary memory, so that callers may mix inference_mode and no_grad.
            with torch.inference_mode(False):
                self._scratch = torch.empty(max(sizes), dtype=pool.dtype, device=pool.device)
        scratches = [self._scratch[:size].view(-1, *page_shape) if size else None for size in sizes]
        return bucketed, scratches

    def has_kernel(self, device: torch.device) -> bool:
        """Tell whether the compiled kernels attend float32 pools of this model on `device`."""
        return can_run(device, torch.float32) and self.config.head_dim % LANES == 0

    def uses_varlen(self, pool: Tensor) -> bool:
        """Tell whether torch's paged variable-length kernel serves pools like this one. Tried once, then remembered."""
        if pool.device.type != "cuda" or self.config.attention_softcap is not None:
            return False
        key = (pool.device, pool.dtype, pool.shape[1])
        if key not in self._varlen_support:
            self._varlen_support[key] = self._try_varlen(pool)
        return self._varlen_support[key]

    def _try_varlen(self, pool: Tensor) -> bool:
        """Compare the kernel with the reference on a small batch: page sizes and types it takes vary by version."""
        page_size = pool.shape[1]
        rows = [
            BatchRow(token_ids=[0], start_position=page_size + 1, page_ids=[2, 0]),
            BatchRow(token_ids=[0, 0, 0], start_position=0, page_ids=[1, 3]),
        ]
        batch = build_forward_batch(rows, page_size=page_size, device=pool.device)
        config = self.config
        generator = torch.Generator(device=pool.device).manual_seed(0)
        small = torch.randn((4, *pool.shape[1:]), generator=generator, device=pool.device).to(pool.dtype)
        shape = (batch.num_tokens, config.num_heads, config.head_dim)
        queries = torch.randn(shape, generator=generator, device=pool.device).to(pool.dtype)
        for window in sorted({config.window(layer) or 0 for layer in range(config.num_layers)}):
            expected = reference_attention(
                queries, small, batch, window=window or None, scale=config.attention_scale, softcap=None
            )
            try:
                got = AttentionPlan(self, batch)._attend_varlen(queries, small, window or None)
            except (RuntimeError, ValueError, NotImplementedError, ImportError):
                return False
            if not torch.allclose(got.float(), expected.float(), atol=0.05):
                return False
        return True
