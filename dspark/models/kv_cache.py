"""The paged key/value pools of one model: one tensor per layer; who owns which page is the engine's business."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class KVShape(Protocol):
    """What the pools need to know of a model; configurations of decoders and drafters fit."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def num_bytes_per_token(config: KVShape, dtype: torch.dtype) -> int:
    """Return the bytes one token takes in the pools of all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of `num_pages` pages of `page_size` tokens, for every layer.

    The keys of a token lie beside its values, so that one gather of pages brings both.
    """

    def __init__(
        self, config: KVShape, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        shape = (num_pages, page_size, 2, config.num_kv_heads, config.head_dim)
        self.pools = [_zeros(shape, dtype, torch.device(device)) for _ in range(config.num_layers)]
        self._slots = [pool.flatten(0, 1).unbind(1) for pool in self.pools]  # (keys, values), [S, KVH, Dh] each

    def clear(self, page_ids: Tensor) -> None:
        """Overwrite what earlier owners left in the pages `page_ids` [P] int64.

        Attention reads whole pages and multiplies masked values by zero, which does not help against what is not a
        number: without this a request whose numbers broke would break the next owners of its pages.
        """
        if len(page_ids):
            for pool in self.pools:
                pool.index_fill_(0, page_ids, 0)

    def write(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Store `keys` and `values` [T, KVH, Dh] of `layer` at the slots `slot_mapping` [T]."""
        key_slots, value_slots = self._slots[layer]
        key_slots.index_copy_(0, slot_mapping, keys)
        value_slots.index_copy_(0, slot_mapping, values)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that on CPU take memory only where they are touched, which `torch.zeros` does not."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
