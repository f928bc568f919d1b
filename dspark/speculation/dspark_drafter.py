"""Drafts from a DSpark drafter: one parallel pass for all requests, then its sequential head from left to right.

Its context, keys and values of the target's features, stands in a KV pool of its own under the target's page tables.
What to expect of a pass is known before it runs: from how the drafts before it were stated and judged.
R contexts of a round, M of them that get a draft, K draft positions, B slots of a block, D hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dspark.models.drafter import Drafter
from dspark.models.drafter_attention import DraftRow
from dspark.models.kv_cache import KVCache
from dspark.speculation.acceptance_rates import DRAFTER_PRIOR, restore_parts
from dspark.speculation.online_calibration import OnlineCalibration
from dspark.speculation.open_draft import OpenDraft, draw_next
from dspark.speculation.position_rates import PositionRates
from dspark.speculation.prefix_scheduler import survivals_of
from dspark.speculation.proposal import NO_DRAFT, CommittedFeatures, Draft, DraftContext, DraftRound, Forecast, Proposer

logger = logging.getLogger(__name__)

FEATURES_PER_WRITE = 128  # committed positions that are written together where no pass needs them before
MAX_PENDING_FEATURES = 4096


class DSparkProposer(Proposer):
    """Proposes with a drafter that reads the target's hidden states of all committed positions.

    Whoever runs the target hands these over with `take_features`, for every request and step, also where no draft is
    wanted. So the pool holds the context of every page that the prefix cache can find, and drafting can begin, pause
    and resume at any time.

    Confidences are those of the drafter's head, calibrated by the file beside it and by what was accepted since;
    without a head they are the running acceptance rates by position. The pass runs for contexts that join it alone;
    when none does, nothing runs.
    """

    name = "dspark"
    has_pass = True

    def __init__(self, drafter: Drafter, *, num_pages: int, page_size: int) -> None:
        """Take a drafter that was loaded for its target; the page size and number are the target's."""
        self.tapped_layers = drafter.config.tap_ids
        self.max_draft_tokens = drafter.config.num_draft_tokens
        self.has_confidences = drafter.config.has_confidence_head
        self._drafter = drafter
        self._kv_cache = KVCache(drafter.config, num_pages, page_size, drafter.dtype, drafter.device)
        self._page_size = page_size
        self._pending: list[CommittedFeatures] = []  # of steps whose keys and values are not written yet, in order
        # Slots drawn independently of each other make incoherent blocks; the argmax of each is accepted more often.
        # (A race under the target's own noise follows the target's draw, so coupled requests do not need this.)
        self.takes_argmax = drafter.config.markov_rank == 0
        self._switched_off: set[str] = set()
        self.rates = PositionRates(DRAFTER_PRIOR)
        self.calibration = OnlineCalibration(self.max_draft_tokens, proposer_name=self.name)
        self._stated: dict[str, list[float]] = {}  # of the latest draft of a request, as the head stated it

    def take_features(self, committed: CommittedFeatures) -> None:
        """Keep what a step committed until a pass needs its keys and values, or enough has come together.

        A product of many rows costs little more than one of a few, and while nobody drafts there is one in many steps.
        """
        self._pending.append(committed)
        if sum(len(features.positions) for features in self._pending) >= FEATURES_PER_WRITE:
            self.write_context()

    @torch.inference_mode()
    def write_context(self) -> None:
        """Write the drafter's keys and values of all positions that were committed.

        What cannot be written is tried again with the next call; past `MAX_PENDING_FEATURES` it is given up, and drafts
        are worse where it is missing.
        """
        try:
            for group in _disjoint_groups(self._pending, self._page_size):
                self._kv_cache.clear(torch.cat([committed.new_page_ids for committed in group]))
                features = torch.cat([committed.features for committed in group])
                if len(features):
                    positions = torch.cat([committed.positions for committed in group])
                    slots = torch.cat([committed.slot_mapping for committed in group])
                    self._drafter.write_context(features, positions, slots, self._kv_cache)
        except Exception:
            if sum(len(committed.positions) for committed in self._pending) > MAX_PENDING_FEATURES:
                self._pending.clear()
            raise
        self._pending.clear()

    def forecast(self, contexts: Sequence[DraftContext]) -> list[Forecast]:
        """Return the survivals that drafts of late had by position, in all requests and in this one."""
        self._settle(contexts)  # all before any, so that no forecast depends on the order of requests
        lengths = [self._draft_len(context) for context in contexts]
        return [
            Forecast(paid=survivals_of(self.rates.confidences(context.request_id, length)))
            for context, length in zip(contexts, lengths, strict=True)
        ]

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return one draft per context, in order. Synchronises a few times per draft position."""
        return self.begin(contexts).draft(range(len(contexts)))

    def begin(self, contexts: Sequence[DraftContext]) -> _DSparkRound:
        """Run the parallel stage for the contexts that join; what follows costs only for those that get a draft."""
        self._settle(contexts)
        self.num_in_pass = sum(context.joins_pass for context in contexts)
        if any(context.joins_pass for context in contexts):
            self.write_context()
        return _DSparkRound(self, contexts)

    def take_verdict(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Learn from a verified draft."""
        stated = self._stated.pop(request_id, None)
        if stated is not None:
            self.calibration.observe(stated[: len(draft.token_ids)], num_accepted)
        self.rates.observe(request_id, num_verified=len(draft.token_ids), num_accepted=num_accepted)

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are harmless. What it taught about all requests stays."""
        self._switched_off.discard(request_id)
        self._stated.pop(request_id, None)
        self.rates.release(request_id)

    def calibration_errors(self) -> Sequence[float | None]:
        """See `Proposer`."""
        return self.calibration.errors() if self.has_confidences else ()

    def reset_calibration(self) -> None:
        """See `Proposer`."""
        self.calibration.reset()

    def export_state(self) -> dict[str, Any]:
        """See `Proposer`."""
        return {"positions": self.rates.export(), "calibration": self.calibration.export_state()}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """See `Proposer`."""
        restorers = {"positions": self.rates.restore, "calibration": self.calibration.restore_state}
        restore_parts(self.name, state, restorers)

    @property
    def num_requests(self) -> int:
        """Requests of which anything is held."""
        return max(len(self._switched_off), len(self._stated), self.rates.num_requests)

    def switch_off(self, request_id: str) -> None:
        """Give a request no more drafts, for the drafter's logits on it are unusable."""
        # What was drawn before stays: to drop it for what followed would bias what comes out.
        logger.warning(
            "the DSpark drafter returned logits without a finite maximum; request %s goes on without drafts", request_id
        )
        self._switched_off.add(request_id)

    def note_draft(self, request_id: str, stated: list[float]) -> None:
        """Keep what the head stated of a request's draft until it is judged."""
        self._stated[request_id] = stated

    def _settle(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            self.rates.settle(context.request_id, len(context.token_ids))

    def _draft_len(self, context: DraftContext) -> int:
        """Return how long a draft may be; 0 for a request whose logits broke or whose text passes the limit."""
        if context.request_id in self._switched_off:
            return 0
        return max(0, min(context.num_draft_tokens, self._drafter.config.max_position - len(context.token_ids)))

    def _open(self, context: DraftContext) -> OpenDraft | None:
        """Return an empty draft; None for a request that gets none."""
        length = self._draft_len(context) if context.joins_pass else 0
        assert length <= self._drafter.config.num_draft_tokens, (length, self._drafter.config.num_draft_tokens)
        return OpenDraft(context=context, length=length) if length else None


def _disjoint_groups(pending: Sequence[CommittedFeatures], page_size: int) -> Iterator[list[CommittedFeatures]]:
    """Cut steps into groups in which no page is begun anew after it was written: its old owner's rows come before."""
    group: list[CommittedFeatures] = []
    written: set[int] = set()
    for committed in pending:
        if not written.isdisjoint(committed.new_page_ids.tolist()):
            yield group
            group, written = [], set()
        group.append(committed)
        written.update((committed.slot_mapping // page_size).tolist())
    if group:
        yield group


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
            with torch.inference_mode():
                self._hidden = self._drafter.run_blocks(self._rows, proposer._kv_cache)  # [R, B, D]

    def first_confidences(self) -> list[float]:
        """See `DraftRound`. Synchronises."""
        confidences = [0.0] * self._num_contexts
        if self._rows:
            with torch.inference_mode():
                known = self._drafter.first_confidences(self._hidden, self._rows).nan_to_num(0.0).tolist()
            for i, row in self._row_of.items():
                confidences[i : i + 1] = self._proposer.calibration.adjust([known[row]])
                self._note_stated(self._drafts[row], confidences[i : i + 1])  # all to be known of those not chosen
        return confidences

    def draft(self, chosen: Sequence[int]) -> list[Draft]:
        """See `DraftRound`. Synchronises a few times per draft position."""
        rows = [self._row_of[i] for i in chosen if i in self._row_of]
        drafted = dict(zip(rows, self._draft_rows(rows), strict=True)) if rows else {}
        return [drafted[self._row_of[i]] if i in self._row_of else NO_DRAFT for i in chosen]

    @torch.inference_mode()
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
        closed = [draft.close() for draft in drafts]
        for i, stated in enumerate(self._confidences(drafts, confidence_steps)):
            confidences = stated[: len(closed[i].token_ids)]
            if not confidences:
                continue
            if confidence_steps:
                self._proposer.note_draft(drafts[i].context.request_id, confidences)
                confidences = self._proposer.calibration.adjust(confidences)
                self._note_stated(drafts[i], confidences)
            closed[i] = replace(closed[i], confidences=confidences)
        return closed

    def _confidences(self, drafts: Sequence[OpenDraft], confidence_steps: Sequence[Tensor]) -> list[list[float]]:
        """Return c_1 .. c_K of each draft, by the head's logits or else by what was accepted before."""
        if confidence_steps:
            confidences: list[list[float]] = self._drafter.confidences(torch.stack(list(confidence_steps), 1)).tolist()
            return confidences
        rates = self._proposer.rates
        return [rates.confidences(draft.context.request_id, draft.length) for draft in drafts]

    def _note_stated(self, draft: OpenDraft, confidences: Sequence[float]) -> None:
        context = draft.context
        self._proposer.rates.note_stated(context.request_id, num_tokens=len(context.token_ids), confidences=confidences)
