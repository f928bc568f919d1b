"""Drafts from a DSpark drafter: one parallel pass for all requests, then its sequential head from left to right.

Its context, keys and values of the target's features, stands in a KV pool of its own under the target's page tables.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from dspark.models.drafter import Drafter
from dspark.models.drafter_attention import DraftRow
from dspark.models.kv_cache import KVCache
from dspark.speculation.open_draft import OpenDraft, draw_next
from dspark.speculation.proposal import NO_DRAFT, CommittedFeatures, Draft, DraftContext, Proposer

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
        self._drafter = drafter
        self._kv_cache = KVCache(drafter.config, num_pages, page_size, drafter.dtype, drafter.device)
        # Slots drawn independently of each other make incoherent blocks; the argmax of each is accepted more often.
        # (A race under the target's own noise follows the target's draw, so coupled requests do not need this.)
        self._takes_argmax = drafter.config.markov_rank == 0
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
        opened = {i: draft for i, context in enumerate(contexts) if (draft := self._open(context)) is not None}
        if opened:
            self._draft(list(opened.values()))
        return [opened[i].close() if i in opened else NO_DRAFT for i in range(len(contexts))]

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are harmless."""
        self._switched_off.discard(request_id)

    def _open(self, context: DraftContext) -> OpenDraft | None:
        """Return an empty draft; None for a request whose logits broke or whose text passes the drafter's limit."""
        length = min(context.num_draft_tokens, self._drafter.config.max_position - len(context.token_ids))
        if length <= 0 or context.request_id in self._switched_off:
            return None
        assert length <= self._drafter.config.num_draft_tokens, (length, self._drafter.config.num_draft_tokens)
        return OpenDraft(context=context, length=length)

    def _draft(self, drafts: Sequence[OpenDraft]) -> None:
        drafter = self._drafter
        rows = [
            DraftRow(
                anchor_token_id=draft.context.token_ids[-1],
                anchor_position=len(draft.context.token_ids) - 1,
                page_ids=draft.context.page_ids,
            )
            for draft in drafts
        ]
        num_steps = max(draft.length for draft in drafts)
        blocks = drafter.draft_blocks(rows, self._kv_cache, num_proposals=num_steps)
        steps = drafter.begin(blocks, rows)
        active = list(range(len(drafts)))
        for k in range(num_steps):
            if not active:
                return
            # All blocks step together, those that are complete too: taking them out would cost more than it saves.
            previous = torch.tensor([draft.last_token_id for draft in drafts], device=drafter.device)
            bias, _ = steps.step(previous)
            logits = blocks.base_logits[:, k] if bias is None else blocks.base_logits[:, k] + bias
            drawn = draw_next(
                [drafts[i] for i in active],
                logits if len(active) == len(drafts) else logits[active],
                vocab_size=drafter.config.vocab_size,
                target_ids=drafter.target_ids,
                takes_argmax=self._takes_argmax,
            )
            for i, was_drawn in zip(active, drawn, strict=True):
                if not was_drawn:
                    self._switch_off(drafts[i].context.request_id)
            active = [i for i, was_drawn in zip(active, drawn, strict=True) if was_drawn and not drafts[i].is_complete]

    def _switch_off(self, request_id: str) -> None:
        # What was drawn before stays: to drop it for what followed would bias what comes out.
        logger.warning(
            "the DSpark drafter returned logits without a finite maximum; request %s goes on without drafts", request_id
        )
        self._switched_off.add(request_id)
