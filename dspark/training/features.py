"""Target features of conversations: the tapped layers the drafter reads and the final hidden states it is judged by.

T tokens of a conversation, m taps, D hidden size of the target. Computed on the fly here; `feature_cache` keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.batch import BatchRow, build_forward_batch
from dspark.config import CacheConfig
from dspark.errors import ConfigError
from dspark.models.decoder import Decoder
from dspark.models.kv_cache import KVCache
from dspark.training.dataset import Conversation

# The engine's default: attention rounds differently over pages of another size.
_PAGE_SIZE = CacheConfig().page_size


@dataclass(frozen=True, kw_only=True)
class Features:
    """What the target computed for one conversation."""

    taps: Tensor  # [T, m * D]
    final_hidden: Tensor | None  # [T, D] after the final norm; None: the source does not deliver it
    log_normalizers: Tensor | None = None  # [T] float32 logsumexp of the target's logits; None: not known ahead


FeatureSource = Callable[[Sequence[Conversation]], list[Features]]


class OnlineFeatures:
    """Runs the target over packed conversations, in passes of at most `chunk_tokens` tokens.

    It is the engine's own decoder over the engine's own cache: for the same text in the same chunks (and the default
    page size) both get the same numbers bit for bit.
    """

    def __init__(self, decoder: Decoder, tap_ids: Sequence[int], *, chunk_tokens: int) -> None:
        self._decoder = decoder
        self._tap_ids = tuple(tap_ids)
        self._chunk_tokens = chunk_tokens
        self._kv_cache: KVCache | None = None

    def __call__(self, conversations: Sequence[Conversation]) -> list[Features]:
        """Return the features of `conversations`, in order, of the decoder's type and on its device."""
        features: list[Features] = []
        pack: list[Conversation] = []
        for conversation in conversations:
            if pack and sum(c.num_tokens for c in pack) + conversation.num_tokens > self._chunk_tokens:
                features += self._run(pack)
                pack = []
            pack.append(conversation)
        return features + (self._run(pack) if pack else [])

    # Not inference_mode: its tensors cannot be kept for the backward pass of the drafter's projection.
    @torch.no_grad()
    def _run(self, pack: Sequence[Conversation]) -> list[Features]:
        num_pages = [-(-conversation.num_tokens // _PAGE_SIZE) for conversation in pack]
        kv_cache = self._cache(sum(num_pages))
        starts = [sum(num_pages[:i]) for i in range(len(pack))]
        pages = [range(start, start + count) for start, count in zip(starts, num_pages, strict=True)]
        # Several conversations fit one pass together; one that is longer than a pass comes alone, in chunks.
        length = max(conversation.num_tokens for conversation in pack)
        step = length if len(pack) > 1 else self._chunk_tokens
        hidden_parts, tap_parts = [], []
        for begin in range(0, length, step):
            rows = [
                BatchRow(
                    token_ids=conversation.token_ids[begin : begin + step].tolist(), start_position=begin, page_ids=own
                )
                for conversation, own in zip(pack, pages, strict=True)
            ]
            batch = build_forward_batch(rows, page_size=_PAGE_SIZE, device=self._decoder.device)
            hidden, taps = self._decoder.forward(batch, kv_cache, tapped_layers=self._tap_ids)
            assert taps is not None, self._tap_ids
            hidden_parts.append(hidden)
            tap_parts.append(taps)
        lengths = [conversation.num_tokens for conversation in pack]
        hidden_rows = torch.cat(hidden_parts).split(lengths)
        return [
            Features(taps=taps, final_hidden=hidden)
            for taps, hidden in zip(torch.cat(tap_parts).split(lengths), hidden_rows, strict=True)
        ]

    def _cache(self, num_pages: int) -> KVCache:
        if self._kv_cache is None or self._kv_cache.num_pages < num_pages:
            decoder = self._decoder
            self._kv_cache = KVCache(decoder.config, num_pages, _PAGE_SIZE, decoder.dtype, decoder.device)
        return self._kv_cache


def check_delivered(features: Sequence[Features], *, needs_target_probs: bool) -> None:
    """Raise `ConfigError` when a term of the loss needs final hidden states that are not there."""
    if needs_target_probs and any(feature.final_hidden is None for feature in features):
        raise ConfigError(
            "the feature source delivers no final hidden states, which l1_weight and confidence_weight need; "
            "use a source that does, or set both weights to 0"
        )
