"""Drafts from a smaller model of the same vocabulary, run over a KV pool of its own.

The pool is indexed by the target's page tables. This file knows which of its slots hold which tokens; running the
model is the caller's. Legend: N rows of logits, M proposals of one pass, V target vocabulary, k length of a draft.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dspark.batch import BatchRow
from dspark.speculation.acceptance_rates import DRAFTER_PRIOR, restore_parts
from dspark.speculation.open_draft import OpenDraft, draw_next
from dspark.speculation.position_rates import PositionRates
from dspark.speculation.prefix_scheduler import survivals_of
from dspark.speculation.proposal import NO_DRAFT, Draft, DraftContext, Forecast, Proposer

logger = logging.getLogger(__name__)

Execute = Callable[[Sequence[BatchRow]], Tensor]


@dataclass(kw_only=True)
class _FedText:
    """The tokens whose KV stands in a request's pages, position by position, and the pages as they were then."""

    token_ids: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    page_serials: list[int] = field(default_factory=list)
    num_committed: int = 0  # of token_ids, known to be committed text
    is_switched_off: bool = False


@dataclass(kw_only=True)
class _Drafting(OpenDraft):
    """One request within one call of `propose`."""

    fed: _FedText

    @property
    def num_missing(self) -> int:
        """Committed tokens that the model has not seen yet."""
        return len(self.context.token_ids) - len(self.fed.token_ids)


class DraftModelProposer(Proposer):
    """Proposes with a smaller model, one pass per draft position for all requests together.

    `execute` runs rows over the draft model's pool and returns logits [N, V_draft] float32 of the last `num_logits`
    tokens of each row, in order. Committed tokens the model has not seen are fed first, at most `max_batch_tokens` a
    call: a request with a long text gets no draft until later calls have fed it, and holds nobody up. A request that
    does not join the pass is not fed either, and catches up when it does.

    Confidences are the running acceptance rates by position (`position_rates`), known before anything is drawn.
    """

    name = "draft_model"
    has_pass = True

    def __init__(
        self,
        execute: Execute,
        *,
        vocab_size: int,  # of the target; ids at or above it are never proposed
        draft_vocab_size: int,  # ids the draft model can read; a text with others gets no draft
        max_model_len: int,  # of the draft model; a text that would pass it gets shorter drafts, then none
        num_pages: int,
        page_size: int,
        max_batch_tokens: int = 512,
    ) -> None:
        assert min(vocab_size, max_model_len, num_pages, page_size, max_batch_tokens) > 0, (vocab_size, num_pages)
        self._execute = execute
        self._vocab_size = vocab_size
        self._draft_vocab_size = draft_vocab_size
        self._max_model_len = max_model_len
        self._page_size = page_size
        self._max_batch_tokens = max_batch_tokens
        self._fed_texts: dict[str, _FedText] = {}
        # The serial under which a page was last filled with committed tokens from end to end; None: never.
        self._filled_serials: list[int | None] = [None] * num_pages
        self._rates = PositionRates(DRAFTER_PRIOR)

    def forecast(self, contexts: Sequence[DraftContext]) -> list[Forecast]:
        """Return the survivals that drafts of late had by position, in all requests and in this one."""
        return [
            Forecast(paid=survivals_of(self._rates.confidences(context.request_id, self._draft_len(context))))
            for context in contexts
        ]

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return one draft per context, in order. Synchronises once or twice per draft position.

        If `execute` raises, the error passes through and what it may have half written counts as unknown.
        """
        joining = ((i, context) for i, context in enumerate(contexts) if context.joins_pass)
        drafting = {i: d for i, context in joining if (d := self._begin(context)) is not None}
        if not drafting:
            return [NO_DRAFT] * len(contexts)
        drafts = dict(zip(drafting, self._run_passes(list(drafting.values())), strict=True))
        return [drafts.get(i, NO_DRAFT) for i in range(len(contexts))]

    def take_verdict(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Learn from a verified draft."""
        self._rates.observe(request_id, num_verified=len(draft.token_ids), num_accepted=num_accepted)

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are harmless. Full pages stay known, for other requests that share them."""
        self._fed_texts.pop(request_id, None)
        self._rates.release(request_id)

    def export_state(self) -> dict[str, Any]:
        """See `Proposer`."""
        return {"positions": self._rates.export()}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """See `Proposer`."""
        restore_parts(self.name, state, {"positions": self._rates.restore})

    @property
    def num_requests(self) -> int:
        """Requests of which anything is held."""
        return max(len(self._fed_texts), self._rates.num_requests)

    @torch.inference_mode()
    def _run_passes(self, drafting: Sequence[_Drafting]) -> list[Draft]:
        """Draw all proposals, one pass per position, and return the drafts."""
        active = self._catch_up(drafting)
        while active:
            rows = [
                BatchRow(
                    token_ids=d.token_ids[-1:],
                    start_position=len(d.fed.token_ids),
                    page_ids=d.context.page_ids,
                    num_logits=1,
                )
                for d in active
            ]
            active = self._advance(active, self._run(active, rows))
        return [self._closed(d) for d in drafting]

    def _closed(self, drafting: _Drafting) -> Draft:
        draft = drafting.close()
        if not draft.token_ids:
            return draft
        rates = self._rates.confidences(drafting.context.request_id, len(draft.token_ids))
        return replace(draft, confidences=rates)

    def _draft_len(self, context: DraftContext) -> int:
        """Return how long a draft may be; 0 for a request that was switched off or whose text passes the limit."""
        fed = self._fed_texts.get(context.request_id)
        if fed is not None and fed.is_switched_off:
            return 0
        return max(0, min(context.num_draft_tokens, self._max_model_len - len(context.token_ids)))

    # -- which KV is right ---------------------------------------------------------------------------------------

    def _begin(self, context: DraftContext) -> _Drafting | None:
        """Find out what of the committed text has right KV; None if the request gets no draft."""
        num_tokens, length = len(context.token_ids), self._draft_len(context)
        fed = self._fed_texts.setdefault(context.request_id, _FedText())
        if not length:
            return None
        num_pages_needed = -(-(num_tokens + length) // self._page_size)
        assert len(context.page_ids) >= num_pages_needed, (num_tokens, length, len(context.page_ids))
        num_valid = self._num_valid(fed, context)
        # Accepted drafts were fed as drafts: only now are their pages known to hold committed text.
        self._mark_filled(context, range(fed.num_committed // self._page_size, num_valid // self._page_size))
        if max(context.token_ids[num_valid:]) >= self._draft_vocab_size:
            fed.is_switched_off = True
            return None
        fed.token_ids = list(context.token_ids[:num_valid])
        fed.page_ids = list(context.page_ids)
        fed.page_serials = list(context.page_serials)
        fed.num_committed = num_valid
        return _Drafting(context=context, fed=fed, length=length)

    def _num_valid(self, fed: _FedText, context: DraftContext) -> int:
        """Return how many leading tokens have right KV, short of the anchor, whose logits are wanted anyway."""
        # Own work holds where the same tokens stand on pages that are still the same (rejected drafts differ).
        num_own_pages = _common_prefix_len(
            list(zip(fed.page_ids, fed.page_serials, strict=True)),
            list(zip(context.page_ids, context.page_serials, strict=True)),
        )
        num_same = _common_prefix_len(fed.token_ids, context.token_ids, start=fed.num_committed)
        num_valid = min(num_same, num_own_pages * self._page_size)
        # Beyond it, pages that anyone filled and whose content the engine vouches for by the serial.
        page = num_valid // self._page_size
        while (
            page < len(context.page_ids) and self._filled_serials[context.page_ids[page]] == context.page_serials[page]
        ):
            page += 1
            num_valid = max(num_valid, page * self._page_size)
        return min(num_valid, len(context.token_ids) - 1)

    def _run(self, active: Sequence[_Drafting], rows: Sequence[BatchRow]) -> Tensor:
        """Execute rows that continue the fed text of each request, and note what they wrote."""
        for d, row in zip(active, rows, strict=True):
            end = row.start_position + len(row.token_ids)
            for page in range(row.start_position // self._page_size, -(-end // self._page_size)):
                self._filled_serials[d.context.page_ids[page]] = None
        # If this raises, the slots past the fed texts and the pages of these rows count as not written.
        logits = self._execute(rows)
        assert logits.shape[0] == sum(row.num_logits for row in rows), (logits.shape, len(rows))
        for d, row in zip(active, rows, strict=True):
            d.fed.token_ids.extend(row.token_ids)
            d.fed.num_committed = min(len(d.fed.token_ids), len(d.context.token_ids))
            self._mark_filled(
                d.context, range(row.start_position // self._page_size, d.fed.num_committed // self._page_size)
            )
        return logits

    def _mark_filled(self, context: DraftContext, pages: range) -> None:
        for page in pages:
            self._filled_serials[context.page_ids[page]] = context.page_serials[page]

    # -- making drafts -------------------------------------------------------------------------------------------

    def _catch_up(self, drafting: Sequence[_Drafting]) -> list[_Drafting]:
        """Feed committed tokens, fewest missing first, within the budget; return who got the first proposal."""
        served: list[_Drafting] = []
        rows: list[BatchRow] = []
        budget = self._max_batch_tokens
        for d in sorted(drafting, key=lambda d: d.num_missing):
            num_fed = min(d.num_missing, budget)
            if num_fed == 0:
                break
            budget -= num_fed
            start = len(d.fed.token_ids)
            served.append(d)
            rows.append(
                BatchRow(
                    token_ids=list(d.context.token_ids[start : start + num_fed]),
                    start_position=start,
                    page_ids=d.context.page_ids,
                    num_logits=1 if num_fed == d.num_missing else 0,
                )
            )
        if not rows:
            return []
        logits = self._run(served, rows)
        return self._advance([d for d, row in zip(served, rows, strict=True) if row.num_logits], logits)

    def _advance(self, active: Sequence[_Drafting], logits: Tensor) -> list[_Drafting]:
        """Add one proposal per request from its row of logits; return who goes on."""
        if not active:
            return []
        drawn = draw_next(active, logits.float(), vocab_size=self._vocab_size)
        for d, was_drawn in zip(active, drawn, strict=True):
            if not was_drawn:
                self._switch_off(d)
        return [d for d, was_drawn in zip(active, drawn, strict=True) if was_drawn and not d.is_complete]

    def _switch_off(self, d: _Drafting) -> None:
        """Give a request no more drafts: the KV behind unusable logits is suspect, and so are its pages for others."""
        logger.warning(
            "the draft model returned logits without a finite maximum; request %s goes on without drafts",
            d.context.request_id,
        )
        d.fed.is_switched_off = True
        for page_id in d.context.page_ids:
            self._filled_serials[page_id] = None


def _common_prefix_len(left: Sequence[object], right: Sequence[object], *, start: int = 0) -> int:
    """Return how far two sequences agree, given that they do up to `start`."""
    end = min(len(left), len(right))
    while start < end and left[start] == right[start]:
        start += 1
    return start
