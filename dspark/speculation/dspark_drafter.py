"""Drafts from a DSpark drafter: one parallel pass for all requests, then its sequential head from left to right.

Its context, keys and values of the target's features, stands in a KV pool of its own under the target's page tables.
R contexts of a round, M of them that get a draft, K draft positions, B slots of a block, D hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dspark.models.drafter import Drafter
from dspark.models.drafter_attention import DraftRow
from dspark.models.kv_cache import KVCache
from dspark.speculation.open_draft import OpenDraft, draw_next
from dspark.speculation.proposal import NO_DRAFT, CommittedFeatures, Draft, DraftContext, DraftRound, Proposer

logger = logging.getLogger(__name__)


class DSparkProposer(Proposer):
    """Proposes with a drafter that reads the target's hidden states of all committed positions.

    Whoever runs the target hands these over with `take_features`, for every request and step, also where no draft is
    wanted. So the pool holds the context of every page that the prefix cache can find, and drafting can begin, pause
    and resume at any time.
    """

    name = "dspark"

    def __init__(self, drafter: Drafter, *, num_pages: int, page_size: int) -> None:
        """Take a drafter that was loaded for its target; the page size and number are the target's."""
        self.tapped_layers = drafter.config.tap_ids
        self.max_draft_tokens = drafter.config.num_draft_tokens
        self.has_confidences = drafter.config.has_confidence_head
        self._drafter = drafter
        self._kv_cache = KVCache(drafter.config, num_pages, page_size, drafter.dtype, drafter.device)
        # Slots drawn independently of each other make incoherent blocks; the argmax of each is accepted more often.
        # (A race under the target's own noise follows the target's draw, so coupled requests do not need this.)
        self.takes_argmax = drafter.config.markov_rank == 0
        self._switched_off: set[str] = set()

    @torch.inference_mode()
    def take_features(self, committed: CommittedFeatures) -> None:
        """Write the drafter's keys and values of the positions that a step committed."""
        self._kv_cache.clear(committed.new_page_ids)
        if len(committed.positions):
            self._drafter.write_context(committed.features, committed.positions, committed.slot_mapping, self._kv_cache)

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return one draft per context, in order. Synchronises a few times per draft position."""
        return self.begin(contexts).draft(range(len(contexts)))

    @torch.inference_mode()
    def begin(self, contexts: Sequence[DraftContext]) -> _DSparkRound:
        """Run the parallel stage for all contexts; what follows costs only for those that get a draft."""
        return _DSparkRound(self, contexts)

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are harmless."""
        self._switched_off.discard(request_id)

    def switch_off(self, request_id: str) -> None:
        """Give a request no more drafts, for the drafter's logits on it are unusable."""
        # What was drawn before stays: to drop it for what followed would bias what comes out.
        logger.warning(
            "the DSpark drafter returned logits without a finite maximum; request %s goes on without drafts", request_id
        )
        self._switched_off.add(request_id)

    def _open(self, context: DraftContext) -> OpenDraft | None:
        """Return an empty draft; None for a request whose logits broke or whose text passes the drafter's limit."""
        length = min(context.num_draft_tokens, self._drafter.config.max_position - len(context.token_ids))
        if length <= 0 or context.request_id in self._switched_off:
            return None
        assert length <= self._drafter.config.num_draft_tokens, (length, self._drafter.config.num_draft_tokens)
        return OpenDraft(context=context, length=length)


class _DSparkRound(DraftRound):
    """The hidden states of a round's blocks; the vocabulary is touched for the chosen ones alone."""

    def __init__(self, proposer: DSparkProposer, contexts: Sequence[DraftContext]) -> None:
        self._proposer = proposer
        self._drafter = proposer._drafter
        self._num_contexts = len(contexts)
        opened = {i: draft for i, context in enumerate(contexts) if (draft := proposer._open(context)) is not None}
        self._drafts = list(opened.values())
        self._row_of = {i: row for row, i in enumerate(opened)}  # context -> row of the pass
        self._rows = [
            DraftRow(
                anchor_token_id=draft.context.token_ids[-1],
                anchor_position=len(draft.context.token_ids) - 1,
                page_ids=draft.context.page_ids,
            )
            for draft in self._drafts
        ]
        if self._rows:
            self._hidden = self._drafter.run_blocks(self._rows, proposer._kv_cache)  # [R, B, D]

    @torch.inference_mode()
    def first_confidences(self) -> list[float]:
        """See `DraftRound`. Synchronises."""
        confidences = [0.0] * self._num_contexts
        if self._rows:
            known = self._drafter.first_confidences(self._hidden, self._rows).nan_to_num(0.0).tolist()
            for i, row in self._row_of.items():
                confidences[i] = known[row]
        return confidences

    @torch.inference_mode()
    def draft(self, chosen: Sequence[int]) -> list[Draft]:
        """See `DraftRound`. Synchronises a few times per draft position."""
        rows = [self._row_of[i] for i in chosen if i in self._row_of]
        drafted = dict(zip(rows, self._draft_rows(rows), strict=True)) if rows else {}
        return [drafted[self._row_of[i]] if i in self._row_of else NO_DRAFT for i in chosen]

    def _draft_rows(self, indices: list[int]) -> list[Draft]:
        """Draw the drafts of these rows of the pass, all together from left to right."""
        drafter = self._drafter
        drafts, rows = [self._drafts[i] for i in indices], [self._rows[i] for i in indices]
        hidden = self._hidden if len(rows) == len(self._rows) else self._hidden[indices]
        num_steps = max(draft.length for draft in drafts)
        blocks = drafter.with_base_logits(hidden, num_proposals=num_steps)
        steps = drafter.begin(blocks, rows)
        confidence_steps: list[Tensor] = []  # logits, each [M]
        active = list(range(len(drafts)))
        for k in range(num_steps):
            if not active:
                break
            # All blocks step together, those that are complete too: taking them out would cost more than it saves.
            previous = torch.tensor([draft.last_token_id for draft in drafts], device=drafter.device)
            bias, confidence_logits = steps.step(previous)
            if confidence_logits is not None:
                confidence_steps.append(confidence_logits)
            logits = blocks.base_logits[:, k] if bias is None else blocks.base_logits[:, k] + bias
            drawn = draw_next(
                [drafts[i] for i in active],
                logits if len(active) == len(drafts) else logits[active],
                vocab_size=drafter.config.vocab_size,
                target_ids=drafter.target_ids,
                takes_argmax=self._proposer.takes_argmax,
            )
            for i, was_drawn in zip(active, drawn, strict=True):
                if not was_drawn:
                    self._proposer.switch_off(drafts[i].context.request_id)
            active = [i for i, was_drawn in zip(active, drawn, strict=True) if was_drawn and not drafts[i].is_complete]
        if not confidence_steps:
            return _closed(drafts, None)
        return _closed(drafts, drafter.confidences(torch.stack(confidence_steps, dim=1)))


def _closed(drafts: Sequence[OpenDraft], confidences: Tensor | None) -> list[Draft]:
    """Return the finished drafts, with their part of the confidences [M, K]."""
    closed = [draft.close() for draft in drafts]
    if confidences is None:
        return closed
    return [
        replace(draft, confidences=row[: len(draft.token_ids)]) if draft.token_ids else draft
        for draft, row in zip(closed, confidences, strict=True)
    ]
