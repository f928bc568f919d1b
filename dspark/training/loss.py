"""The drafter's loss (Eq. 9-12): cross entropy, L1 distance to the target, confidence, at supervised slots only.

S supervised slots, V target ids, Vd draft ids, D hidden, K proposals. Logits exist for `chunk_slots` slots at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.errors import ConfigError
from dspark.models.drafter_module import BlockFeatures, DrafterModule
from dspark.training.blocks import BlockBatch
from dspark.training.checkpoint import TrainedModule

TargetLogits = Callable[[Tensor], Tensor]  # final hidden [U, D] -> logits [U, V] float32, or those of some ids


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Factors of the three terms and the decay d of a slot's weight exp(-(k-1)/d)."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True, kw_only=True)
class SlotLosses:
    """The terms of each slot of a chunk, before any weight."""

    cross_entropy: Tensor  # [S] 0 where the label is no draft id
    l1: Tensor | None  # [S] in [0, 2]
    confidence: Tensor | None  # [S]
    acceptance: Tensor | None  # [S] detached, 1 - l1 / 2
    is_greedy_match: Tensor | None  # [S] bool, both argmaxes are the same token


@dataclass
class LossSums:
    """Sums over slots; divide by their number. Terms carry the slots' weights but not the terms' factors."""

    cross_entropy: Tensor  # scalar
    l1: Tensor  # scalar
    confidence: Tensor  # scalar
    acceptance: Tensor  # [K] exact acceptance rate by proposal
    greedy_matches: Tensor  # [K]
    num_slots: Tensor  # [K]

    @classmethod
    def zeros(cls, num_proposals: int, device: torch.device) -> LossSums:
        return cls.from_flat(torch.zeros(3 + 3 * num_proposals, dtype=torch.float64, device=device))

    def flat(self) -> Tensor:  # [3 + 3K]
        """Return all sums in one vector, for adding up over processes."""
        scalars = torch.stack([self.cross_entropy, self.l1, self.confidence])
        return torch.cat([scalars, self.acceptance, self.greedy_matches, self.num_slots])

    @classmethod
    def from_flat(cls, flat: Tensor) -> LossSums:
        """Undo `flat`."""
        acceptance, matches, slots = flat[3:].chunk(3)
        return cls(flat[0], flat[1], flat[2], acceptance, matches, slots)

    def add(self, losses: SlotLosses, proposals: Tensor, weights: Tensor) -> None:
        """Count the slots of a chunk; `proposals` [S] from 0, `weights` [S]."""
        self.cross_entropy += (losses.cross_entropy.detach() * weights).sum()
        if losses.l1 is not None:
            self.l1 += (losses.l1.detach() * weights).sum()
        if losses.confidence is not None:
            self.confidence += (losses.confidence.detach() * weights).sum()
        if losses.acceptance is not None:
            self.acceptance.index_add_(0, proposals, losses.acceptance.double())
        if losses.is_greedy_match is not None:
            self.greedy_matches.index_add_(0, proposals, losses.is_greedy_match.double())
        self.num_slots.index_add_(0, proposals, torch.ones_like(proposals, dtype=torch.float64))


@dataclass(frozen=True, kw_only=True)
class ChosenSlots:
    """The supervised slots of a batch in the order of what judges them, so that neighbours share target logits."""

    hidden: Tensor  # [S, D]
    latent: Tensor | None  # [S, r]
    confidence_logits: Tensor | None  # [S]
    labels: Tensor  # [S]
    target_rows: Tensor  # [S]
    proposals: Tensor  # [S] int64 from 0
    blocks: Tensor  # [S] int64

    @classmethod
    def of(cls, module: TrainedModule, features: BlockFeatures, batch: BlockBatch) -> ChosenSlots:
        blocks, slots = batch.is_supervised.nonzero(as_tuple=True)
        order = batch.target_rows[blocks, slots].argsort(stable=True)
        at = (blocks[order], slots[order])
        confidence = features.confidence_logits
        return cls(
            hidden=features.hidden[at],
            latent=None if features.latent is None else features.latent[at],
            confidence_logits=None if confidence is None else confidence[at],
            labels=batch.labels[at],
            target_rows=batch.target_rows[at],
            proposals=at[1] - module.config.first_proposal_slot,
            blocks=at[0],
        )

    def detached(self) -> ChosenSlots:
        """Return leaves that gather gradients of their own."""

        def leaf(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.detach().requires_grad_()

        hidden = leaf(self.hidden)
        assert hidden is not None
        return ChosenSlots(
            hidden=hidden,
            latent=leaf(self.latent),
            confidence_logits=leaf(self.confidence_logits),
            labels=self.labels,
            target_rows=self.target_rows,
            proposals=self.proposals,
            blocks=self.blocks,
        )

    def outputs(self) -> list[Tensor]:
        """Return what the module computed: hidden, latent, confidence logits, where they exist."""
        return [x for x in (self.hidden, self.latent, self.confidence_logits) if x is not None]


class DrafterLoss:
    """The loss of one drafter against one target, whose head is frozen."""

    def __init__(
        self,
        module: TrainedModule,
        target_logits: TargetLogits,
        weights: LossWeights,
        *,
        chunk_slots: int,
        kept_target_logits: TargetLogits | None = None,
    ) -> None:
        """Take the target's logits, and for a pruned vocabulary perhaps a cheaper way to those of the draft ids.

        `kept_target_logits` serves batches that know their normalizers: the other logits are not needed then.
        """
        self._module = module
        self._target_logits = target_logits
        self._kept_target_logits = kept_target_logits
        self._weights = weights
        self._chunk_slots = chunk_slots
        config = module.config
        device = module.lm_head.weight.device
        self._slot_weights = torch.exp(-torch.arange(config.num_draft_tokens, device=device) / weights.decay)
        self._kept_ids = module.target_ids  # [Vd] or None
        self._draft_ids = torch.arange(config.vocab_size, device=device)  # [V] -1: cannot be proposed
        if self._kept_ids is not None:
            self._draft_ids.fill_(-1)
            self._draft_ids[self._kept_ids] = torch.arange(config.draft_vocab_size, device=device)

    @property
    def _needs_probs(self) -> bool:
        confidence = self._module.confidence_head is not None and self._weights.confidence > 0
        return self._weights.l1 > 0 or confidence

    def backward(self, features: BlockFeatures, batch: BlockBatch, *, scale: float) -> LossSums:
        """Add the gradients of `scale` times the weighted sum over slots, and return the sums.

        Each chunk goes backward to the slots' hidden states before the next one is made, then the drafter's layers go
        backward once: as little memory as recomputing each chunk's logits, without making them twice. A batch without
        supervised slots adds nothing.
        """
        weights = self._weights
        sums = LossSums.zeros(self._module.config.num_draft_tokens, features.hidden.device)
        computed = ChosenSlots.of(self._module, features, batch)
        if not len(computed.labels):
            return sums
        leaves = computed.detached()
        for part, losses in self._chunks(leaves, batch, needs_matches=False):
            slot_weights = self._slot_weights[leaves.proposals[part]]
            total = weights.ce * losses.cross_entropy
            if losses.l1 is not None:
                total = total + weights.l1 * losses.l1
            if losses.confidence is not None:
                total = total + weights.confidence * losses.confidence
            ((total * slot_weights).sum() * scale).backward()
            sums.add(losses, leaves.proposals[part], slot_weights)
        pairs = [
            (output, leaf.grad)
            for output, leaf in zip(computed.outputs(), leaves.outputs(), strict=True)
            if output.requires_grad and leaf.grad is not None
        ]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return sums

    @torch.no_grad()
    def measure(self, features: BlockFeatures, batch: BlockBatch) -> tuple[LossSums, ChosenSlots, Tensor, Tensor]:
        """Return the sums, the slots in order, and their acceptance [S] and greedy matches [S] bool; no gradients."""
        sums = LossSums.zeros(self._module.config.num_draft_tokens, features.hidden.device)
        chosen = ChosenSlots.of(self._module, features, batch)
        acceptance = torch.zeros(len(chosen.labels), device=features.hidden.device)
        matches = torch.zeros(len(chosen.labels), dtype=torch.bool, device=features.hidden.device)
        for part, losses in self._chunks(chosen, batch, needs_matches=True):
            sums.add(losses, chosen.proposals[part], self._slot_weights[chosen.proposals[part]])
            if losses.acceptance is not None and losses.is_greedy_match is not None:
                acceptance[part], matches[part] = losses.acceptance, losses.is_greedy_match
        return sums, chosen, acceptance, matches

    def _chunks(
        self, chosen: ChosenSlots, batch: BlockBatch, *, needs_matches: bool
    ) -> Iterator[tuple[slice, SlotLosses]]:
        if self._needs_probs and batch.final_hidden is None:
            raise ConfigError(
                f"l1_weight ({self._weights.l1}) and confidence_weight ({self._weights.confidence}) need the target's "
                "final hidden states, which the feature source does not deliver; use one that does or set both to 0"
            )
        for start in range(0, len(chosen.labels), self._chunk_slots):
            part = slice(start, start + self._chunk_slots)
            yield part, self._slot_losses(chosen, part, batch, needs_matches=needs_matches)

    def _slot_losses(self, chosen: ChosenSlots, part: slice, batch: BlockBatch, *, needs_matches: bool) -> SlotLosses:
        module = self._module
        logits = module.base_logits(chosen.hidden[part]).float()  # [s, Vd]
        if chosen.latent is not None:
            assert isinstance(module, DrafterModule), "only DSpark's drafter has a sequential head"
            logits = logits + module.bias(chosen.latent[part]).float()
        draft_labels = self._draft_ids[chosen.labels[part]]
        if batch.final_hidden is None:
            cross_entropy = F.cross_entropy(logits, draft_labels, ignore_index=-1, reduction="none")
            return SlotLosses(
                cross_entropy=cross_entropy, l1=None, confidence=None, acceptance=None, is_greedy_match=None
            )
        rows, inverse = chosen.target_rows[part].unique(return_inverse=True)
        target, outside, best = self._target_probs(batch, rows, needs_best=needs_matches)
        cross_entropy, kept_l1 = _DistributionTerms.apply(logits, draft_labels, target[inverse])
        l1 = kept_l1 + outside[inverse]
        acceptance = 1 - 0.5 * l1.detach()
        confidence = None
        if chosen.confidence_logits is not None:
            predicted = chosen.confidence_logits[part].float()
            confidence = F.binary_cross_entropy_with_logits(predicted, acceptance.clamp(0, 1), reduction="none")
        matches = None
        if best is not None:
            drawn = logits.detach().argmax(-1)
            matches = (drawn if self._kept_ids is None else self._kept_ids[drawn]) == best[inverse]
        return SlotLosses(
            cross_entropy=cross_entropy, l1=l1, confidence=confidence, acceptance=acceptance, is_greedy_match=matches
        )

    @torch.no_grad()
    def _target_probs(
        self, batch: BlockBatch, rows: Tensor, *, needs_best: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the target's probabilities [U, Vd] of the draft ids, its mass [U] outside, its best id [U] if needed.

        The full softmax, not one over the draft ids: mass that can never be proposed is lost acceptance, and with it
        in the L1 distance 1 - l1 / 2 is the exact acceptance rate.
        """
        assert batch.final_hidden is not None, "checked by `_chunks`"
        final_hidden = batch.final_hidden[rows]
        with torch.autocast(final_hidden.device.type, enabled=False):  # what is learned must be what is served
            if batch.log_normalizers is not None and self._kept_target_logits is not None and not needs_best:
                logits = self._kept_target_logits(final_hidden)
                kept = logits.sub_(batch.log_normalizers[rows, None]).exp_()
                return kept, (1 - kept.sum(-1)).clamp(min=0), None
            logits = self._target_logits(final_hidden)
        probs = logits.softmax(-1)[:, : self._module.config.vocab_size]
        if self._kept_ids is None:
            return probs, probs.new_zeros(len(probs)), logits.argmax(-1)
        kept = probs[:, self._kept_ids]
        return kept, (1 - kept.sum(-1)).clamp(min=0), logits.argmax(-1)


class _DistributionTerms(torch.autograd.Function):
    """Cross entropy and L1 distance of softmax(logits) to a distribution, with their gradients in closed form.

    With p = softmax(z), d CE / dz = p - onehot and d L1 / dz = p * (sign - <p, sign>), where sign = sign(p - target):
    half the passes over [s, Vd] that autograd would make, and these are what a small drafter's training waits for.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return [s] each; `labels` below 0 have no cross entropy."""
        probs = logits.softmax(-1)
        best, place = logits.max(-1)
        # Through the best id, whose probability never underflows.
        log_normalizers = best - probs.gather(1, place[:, None])[:, 0].log()
        has_label = labels >= 0
        labels = labels.clamp(min=0)
        cross_entropy = (log_normalizers - logits.gather(1, labels[:, None])[:, 0]) * has_label
        difference = probs - target
        l1 = difference.abs().sum(-1)
        ctx.save_for_backward(probs, difference, labels, has_label)
        return cross_entropy, l1

    @staticmethod
    def backward(ctx: Any, cross_entropy_grad: Tensor, l1_grad: Tensor) -> tuple[Tensor, None, None]:
        probs, difference, labels, has_label = ctx.saved_tensors
        cross_entropy_grad = (cross_entropy_grad * has_label)[:, None]
        gradient = difference.sign()
        mean_sign = torch.linalg.vecdot(gradient, probs)[:, None]
        gradient.sub_(mean_sign).mul_(l1_grad[:, None]).add_(cross_entropy_grad).mul_(probs)
        gradient.scatter_add_(1, labels[:, None], -cross_entropy_grad)
        return gradient, None, None
