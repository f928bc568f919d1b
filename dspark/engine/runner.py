"""Runs the decoder over a batch of rows and its own KV pool. The only place that knows the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dspark.batch import BatchRow, build_forward_batch
from dspark.models.decoder import Decoder
from dspark.models.kv_cache import KVCache


class TargetRunner(Protocol):
    """What the engine needs of a model: logits for rows of tokens whose earlier KV stands in the pages."""

    def execute(self, rows: Sequence[BatchRow]) -> Tensor:
        """Return logits [N, V] float32 of the last `num_logits` tokens of each row, in order."""
        ...


class Runner:
    """A decoder with a paged KV pool of `num_pages` pages."""

    def __init__(self, decoder: Decoder, *, num_pages: int, page_size: int) -> None:
        self.decoder = decoder
        self._page_size = page_size
        self._kv_cache = KVCache(
            decoder.config, num_pages=num_pages, page_size=page_size, dtype=decoder.dtype, device=decoder.device
        )

    @torch.inference_mode()
    def execute(self, rows: Sequence[BatchRow]) -> Tensor:
        """Write the KV of all rows and return logits [N, V] float32 where `num_logits` asks for them."""
        self._clear_new_pages(rows)
        batch = build_forward_batch(rows, page_size=self._page_size, device=self.decoder.device)
        hidden, _ = self.decoder(batch, self._kv_cache)
        return self.decoder.compute_logits(hidden.index_select(0, batch.logits_indices))

    def _clear_new_pages(self, rows: Sequence[BatchRow]) -> None:
        """Overwrite what an earlier owner left in pages that these rows begin.

        Attention reads whole pages and multiplies masked values by zero, which does not help against what is not a
        number: without this a request whose numbers broke would break the next owners of its pages.
        """
        size = self._page_size
        new_pages = [
            page_id
            for row in rows
            for page_id in row.page_ids[
                -(-row.start_position // size) : -(-(row.start_position + len(row.token_ids)) // size)
            ]
        ]
        if new_pages:
            indices = torch.tensor(new_pages, device=self.decoder.device)
            for pool in self._kv_cache.pools:
                pool.index_fill_(0, indices, 0)
