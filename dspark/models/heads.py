"""The sequential (Markov) head and the confidence head: one set of formulas for training and for drafting.

R blocks, B slots, D hidden, r Markov rank, V target ids (which index W1), Vd draft ids (rows of W2).
Linear maps come as callables: `nn.Linear` in the trainable module, `PackedLinear` when drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.models.drafter_config import DrafterConfig
from dspark.models.layers import PackedLinear

Linear = Callable[[Tensor], Tensor]


def gated_latent(embedded: Tensor, hidden: Tensor, gate: Linear) -> Tensor:
    """Return sigmoid(G [hidden; W1[previous]]) * W1[previous], [..., r]."""
    return torch.sigmoid(gate(torch.cat([hidden, embedded], dim=-1))) * embedded


def rnn_latent(state: Tensor, embedded: Tensor, hidden: Tensor, joint: Linear) -> tuple[Tensor, Tensor]:
    """Return the input of W2 [..., r] and the next state [..., r] of the recurrent head (Eq. 6)."""
    gate, candidate, output = joint(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
    gate = torch.sigmoid(gate)
    return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


def confidence_logits(hidden: Tensor, embedded: Tensor | None, projection: Linear) -> Tensor:
    """Return the logit [...] that a slot's token is accepted if all earlier ones were (Eq. 7).

    `embedded` is W1[previous] where the head reads it; it never sees the token of the slot itself.
    """
    inputs = hidden if embedded is None else torch.cat([hidden, embedded], dim=-1)
    return projection(inputs).squeeze(-1)


class SequentialHead:
    """The heads while drafting, with packed weights. Blocks of all requests take their steps together."""

    def __init__(self, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors of a checkpoint by their stored names."""
        self.config = config
        rank = config.markov_rank
        self.w1 = tensors["markov_head.markov_w1.weight"] if rank else None  # [V, r]
        self.w2 = PackedLinear(tensors["markov_head.markov_w2.weight"]) if rank else None
        self.gate = _packed(tensors, "markov_head.gate_proj") if config.markov_head_type == "gated" else None
        self.joint = _packed(tensors, "markov_head.joint_proj") if config.markov_head_type == "rnn" else None
        self.confidence = _packed(tensors, "confidence_head.proj") if config.has_confidence_head else None

    def first_confidence_logits(self, hidden: Tensor, anchor_token_ids: Tensor) -> Tensor:
        """Return the confidence logits [R] float32 of the first proposals, known before anything is drawn.

        `hidden` [R, B, D] and anchors [R] as for `begin`; only for a drafter with a confidence head.
        """
        slot = hidden[:, self.config.first_proposal_slot]
        return self.confidence_logits(slot, None if self.w1 is None else F.embedding(anchor_token_ids, self.w1))

    def confidence_logits(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """Return the confidence logits [R] float32 of one slot, `hidden` [R, D], `embedded` W1[previous] [R, r]."""
        assert self.confidence is not None, "the drafter has no confidence head"
        read = embedded if self.config.confidence_uses_markov else None
        return confidence_logits(hidden, read, self.confidence).float()

    def begin(self, hidden: Tensor, anchor_token_ids: Tensor) -> HeadSteps:
        """Start R blocks with `hidden` [R, B, D] from the backbone and their anchors [R]."""
        return HeadSteps(self, hidden, anchor_token_ids)


class HeadSteps:
    """One pass along the proposals of R blocks, left to right."""

    def __init__(self, head: SequentialHead, hidden: Tensor, anchor_token_ids: Tensor) -> None:
        self._head = head
        self._hidden = hidden
        self._slot = head.config.first_proposal_slot
        self._state: Tensor | None = None
        if head.joint is not None:
            assert head.w1 is not None
            self._state = hidden.new_zeros((hidden.shape[0], head.config.markov_rank))
            for slot in range(self._slot):  # proposes nothing but feeds the state
                embedded = F.embedding(anchor_token_ids, head.w1)
                _, self._state = rnn_latent(self._state, embedded, hidden[:, slot], head.joint)

    def step(self, previous_token_ids: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Go to the next proposal, whose predecessors are `previous_token_ids` [R]: target ids, at first the anchors.

        Returns the bias [R, Vd] float32 on the proposal's base logits (None without a Markov head) and the confidence
        logits [R] float32 (None without a confidence head).
        """
        assert self._slot < self._head.config.block_size, (self._slot, self._head.config.block_size)
        head, hidden = self._head, self._hidden[:, self._slot]
        self._slot += 1
        bias = embedded = None
        if head.w1 is not None and head.w2 is not None:
            embedded = F.embedding(previous_token_ids, head.w1)
            latent = embedded
            if head.gate is not None:
                latent = gated_latent(embedded, hidden, head.gate)
            elif head.joint is not None:
                assert self._state is not None
                latent, self._state = rnn_latent(self._state, embedded, hidden, head.joint)
            bias = head.w2(latent).float()
        if head.confidence is None:
            return bias, None
        return bias, head.confidence_logits(hidden, embedded)


def _packed(tensors: Mapping[str, Tensor], name: str) -> PackedLinear:
    return PackedLinear(tensors[f"{name}.weight"], tensors[f"{name}.bias"])
