"""Training blocks: random anchors of conversations, and what each slot reads, predicts and is judged by.

N blocks of B slots over T packed context positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.models.drafter_config import DrafterConfig
from dspark.training.dataset import Conversation
from dspark.training.features import Features


@dataclass(frozen=True, kw_only=True)
class BlockBatch:
    """The blocks of several packed conversations, as `DrafterModule.forward` and the loss take them."""

    context_features: Tensor  # [T, m * D]
    context_positions: Tensor  # [T] int64, restarting with each conversation
    next_token_ids: Tensor  # [T] int64 the token after each context position; 0 after the last one
    anchor_token_ids: Tensor  # [N] int64
    anchor_positions: Tensor  # [N] int64
    context_visible: Tensor  # [N, T] bool: own conversation, strictly before the anchor
    previous_token_ids: Tensor  # [N, B] int64
    labels: Tensor  # [N, B] int64 target ids; 0 where not supervised
    is_supervised: Tensor  # [N, B] bool; slots past the end or outside an answer are not
    target_rows: Tensor  # [N, B] int64 row of [T] whose final hidden state predicts the label; 0 where not supervised
    final_hidden: Tensor | None  # [T, D] of the target
    log_normalizers: Tensor | None  # [T] float32 logsumexp of the target's logits, where the features know it

    @property
    def num_blocks(self) -> int:
        return self.anchor_token_ids.shape[0]


def anchor_candidates(conversation: Conversation, config: DrafterConfig) -> np.ndarray:
    """Return the positions [A] at which a block would have at least one supervised slot.

    Fill-in's first slot proposes nothing and does not count.
    """
    return np.flatnonzero(_supervised_slots(conversation, config, np.arange(conversation.num_tokens)).any(axis=1))


def draw_anchors(
    conversation: Conversation, config: DrafterConfig, *, num_anchors: int, seed: int, epoch: int
) -> np.ndarray:
    """Return at most `num_anchors` distinct anchor positions, ascending, drawn anew for each epoch and conversation."""
    candidates = anchor_candidates(conversation, config)
    if len(candidates) <= num_anchors:
        return candidates
    generator = np.random.default_rng([seed, epoch, conversation.index])
    return np.sort(generator.choice(candidates, num_anchors, replace=False))


def count_supervised(conversation: Conversation, config: DrafterConfig, anchors: np.ndarray) -> int:
    """Return the number of supervised slots of blocks at `anchors`."""
    return int(_supervised_slots(conversation, config, anchors).sum())


def build_blocks(
    conversations: Sequence[Conversation],
    features: Sequence[Features],
    anchors: Sequence[np.ndarray],
    config: DrafterConfig,
    *,
    device: torch.device,
) -> BlockBatch:
    """Pack conversations, their features and their anchors into one batch of blocks on `device`."""
    lengths = [conversation.num_tokens for conversation in conversations]
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
    predicted, previous = np.array(config.predicted_offsets), np.array(config.previous_offsets)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("token", "position", "document", "previous")}
    parts |= {name: [] for name in ("label", "supervised", "row")}
    for document, (conversation, own, start) in enumerate(zip(conversations, anchors, starts, strict=True)):
        ids, last = conversation.token_ids, conversation.num_tokens - 1
        supervised = _supervised_slots(conversation, config, own)
        targets = own[:, None] + predicted
        parts["token"].append(ids[own])
        parts["position"].append(own)
        parts["document"].append(np.full(len(own), document))
        parts["previous"].append(ids[np.minimum(own[:, None] + previous, last)])
        parts["label"].append(np.where(supervised, ids[np.minimum(targets, last)], 0))
        parts["supervised"].append(supervised)
        parts["row"].append(np.where(supervised, start + targets - 1, 0))
    tensors = {name: torch.from_numpy(np.concatenate(values)).to(device) for name, values in parts.items()}
    positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device)
    documents = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)
    following = np.concatenate([np.append(conversation.token_ids[1:], 0) for conversation in conversations])
    own_document = documents == tensors["document"][:, None]
    hidden = [feature.final_hidden for feature in features if feature.final_hidden is not None]
    normalizers = [feature.log_normalizers for feature in features if feature.log_normalizers is not None]
    return BlockBatch(
        context_features=torch.cat([feature.taps for feature in features]).to(device=device, dtype=torch.float32),
        context_positions=positions,
        next_token_ids=torch.from_numpy(following).to(device),
        anchor_token_ids=tensors["token"],
        anchor_positions=tensors["position"],
        context_visible=own_document & (positions < tensors["position"][:, None]),
        previous_token_ids=tensors["previous"],
        labels=tensors["label"],
        is_supervised=tensors["supervised"],
        target_rows=tensors["row"],
        final_hidden=torch.cat(hidden).to(device) if len(hidden) == len(features) else None,
        log_normalizers=torch.cat(normalizers).to(device) if len(normalizers) == len(features) else None,
    )


def _supervised_slots(conversation: Conversation, config: DrafterConfig, anchors: np.ndarray) -> np.ndarray:
    """Return [N, B] whether the token a slot proposes exists and is the target's own."""
    targets = anchors[:, None] + np.array(config.predicted_offsets)
    inside = targets < conversation.num_tokens
    supervised = inside & conversation.is_supervised[np.minimum(targets, conversation.num_tokens - 1)]
    supervised[:, : config.first_proposal_slot] = False
    # Position 0 has no final hidden state before it; only an anchor's own slot could ask for it.
    return supervised & (targets > 0)
