"""Runs the decoder over a batch of rows and its own KV pool. The only place that knows the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from dspark.batch import BatchRow, ForwardBatch, build_forward_batch
from dspark.models.decoder import Decoder
from dspark.models.kv_cache import KVCache
from dspark.speculation.proposal import CommittedFeatures


class TargetRunner(Protocol):
    """What the engine needs of a model: logits for rows of tokens whose earlier KV stands in the pages."""

    def execute(self, rows: Sequence[BatchRow]) -> Tensor:
        """Return logits [N, V] float32 of the last `num_logits` tokens of each row, in order."""
        ...

    def logits_of(self, token_indices: Sequence[int]) -> Tensor:
        """Return logits [N, V] float32 of tokens of the rows executed last, by their index in the flattened batch."""
        ...

    def committed_features(self, num_committed: Sequence[int]) -> CommittedFeatures:
        """Return what the layers the proposer wants gave for the first `num_committed[r]` tokens of each row r.

        Speaks of the rows executed last; not called when the proposer wants no layers.
        """
        ...


class Runner:
    """A decoder with a paged KV pool of `num_pages` pages, which remembers the `tapped_layers` of its latest pass."""

    def __init__(self, decoder: Decoder, *, num_pages: int, page_size: int, tapped_layers: Sequence[int] = ()) -> None:
        self.decoder = decoder
        self._tapped_layers = tuple(tapped_layers)
        self._batch: ForwardBatch | None = None
        self._taps: Tensor | None = None  # [T, m * D]
        self._hidden: Tensor | None = None  # [T, D]
        self._new_page_ids = torch.empty(0, dtype=torch.int64)
        self._page_size = page_size
        self._kv_cache = KVCache(
            decoder.config, num_pages=num_pages, page_size=page_size, dtype=decoder.dtype, device=decoder.device
        )

    @torch.inference_mode()
    def execute(self, rows: Sequence[BatchRow]) -> Tensor:
        """Write the KV of all rows and return logits [N, V] float32 where `num_logits` asks for them."""
        self._new_page_ids = self._begun_pages(rows)
        self._kv_cache.clear(self._new_page_ids)
        batch = build_forward_batch(rows, page_size=self._page_size, device=self.decoder.device)
        hidden, taps = self.decoder(batch, self._kv_cache, tapped_layers=self._tapped_layers)
        self._hidden = hidden
        if taps is not None:
            self._batch, self._taps = batch, taps
        return self.decoder.compute_logits(hidden.index_select(0, batch.logits_indices))

    @torch.inference_mode()
    def logits_of(self, token_indices: Sequence[int]) -> Tensor:
        """Return logits [N, V] float32 of tokens of the rows executed last, by their index in the flattened batch."""
        assert self._hidden is not None, "nothing was executed yet"
        indices = torch.tensor(token_indices, dtype=torch.int64, device=self._hidden.device)
        return self.decoder.compute_logits(self._hidden.index_select(0, indices))

    def committed_features(self, num_committed: Sequence[int]) -> CommittedFeatures:
        """Return the tapped layers' outputs of the first `num_committed[r]` tokens of each row r executed last."""
        assert self._taps is not None and self._batch is not None, "the runner taps no layers"
        batch, taps = self._batch, self._taps
        assert len(num_committed) == len(batch.query_lens), (len(num_committed), batch.query_lens)
        positions, slots = batch.positions, batch.slot_mapping
        if tuple(num_committed) != batch.query_lens:
            starts = accumulate(batch.query_lens, initial=0)
            kept = [i for start, count in zip(starts, num_committed, strict=False) for i in range(start, start + count)]
            indices = torch.tensor(kept, dtype=torch.int64, device=taps.device)
            taps, positions, slots = taps[indices], positions[indices], slots[indices]
        return CommittedFeatures(
            features=taps, positions=positions, slot_mapping=slots, new_page_ids=self._new_page_ids
        )

    def _begun_pages(self, rows: Sequence[BatchRow]) -> Tensor:
        """Return the pages [P] int64 whose first position is in these rows."""
        size = self._page_size
        page_ids = [
            page_id
            for row in rows
            for page_id in row.page_ids[
                -(-row.start_position // size) : -(-(row.start_position + len(row.token_ids)) // size)
            ]
        ]
        return torch.tensor(page_ids, dtype=torch.int64, device=self.decoder.device)
