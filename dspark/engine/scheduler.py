"""Decides what one step computes: who runs, which prefill chunks, which draft prefixes. No torch.

Order of claims on the token budget: one token for each decoding request, then drafts and prefill chunks (which
share what is left by halves while both want it), oldest request first. Order of claims on pages: a running
request's next token, then drafts; when a token finds no page, drafts are dropped before anyone is preempted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from dspark.config import BatchingConfig
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.sequence import Sequence
from dspark.speculation.proposal import NO_DRAFT, Draft

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ScheduledRow:
    """What one request computes in a step: `num_tokens` committed tokens, then the draft."""

    sequence: Sequence
    num_tokens: int
    draft: Draft = NO_DRAFT

    @property
    def is_sampled(self) -> bool:
        """Whether the row reaches the last committed token, so that new tokens come out."""
        return self.num_tokens == self.sequence.num_uncomputed

    @property
    def is_round(self) -> bool:
        """Whether the row decodes rather than ends a prefill. Ask before the sequence grows."""
        return self.sequence.num_output_tokens > 0 and self.num_tokens == 1


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """The rows of one step, and the requests that lost their place for it."""

    rows: list[ScheduledRow]
    preempted: list[Sequence]


class Scheduler:
    """Owns the waiting queue and the running list; the engine owns what happens to them."""

    def __init__(self, batching: BatchingConfig, allocator: PageAllocator) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._batching = batching
        self._allocator = allocator

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, wherever it stands, and give back its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.release_pages(self._allocator)

    def schedule(self) -> ScheduledStep:
        """Choose the rows of the next step and own the pages they write."""
        preempted = self._secure_next_tokens()
        decoding = [s for s in self.running if s.is_decoding]
        prefilling = [s for s in self.running if not s.is_decoding]
        budget = self._batching.max_batch_tokens - len(decoding)
        if not preempted:  # a request that was sent back must not be overtaken in the same step
            self._admit(prefilling, budget)

        wants_prefill = sum(s.num_uncomputed for s in prefilling)
        wants_drafts = sum(len(s.draft.token_ids) for s in decoding)
        draft_budget = min(wants_drafts, max(budget // 2, budget - wants_prefill))
        lengths = even_shares([len(s.draft.token_ids) for s in decoding], draft_budget)
        rows = [
            ScheduledRow(sequence=s, num_tokens=1, draft=s.draft.prefix(length))
            for s, length in zip(decoding, lengths, strict=True)
        ]
        budget -= sum(lengths)
        for sequence in prefilling:
            chunk = min(sequence.num_uncomputed, budget)
            if chunk == 0:
                break
            rows.append(ScheduledRow(sequence=sequence, num_tokens=chunk))
            budget -= chunk
        return ScheduledStep(rows=rows, preempted=preempted)

    def _secure_next_tokens(self) -> list[Sequence]:
        """Give each decoding request a page for its anchor, dropping drafts and then the latest requests."""
        preempted: list[Sequence] = []
        for sequence in list(self.running):
            while sequence in self.running and not sequence.grow_pages(len(sequence.token_ids), self._allocator):
                if not self._drop_draft_pages():
                    preempted.append(self._preempt_latest())
        return preempted

    def _drop_draft_pages(self) -> bool:
        """Take back pages that only drafts need; True when that freed any."""
        was_freed = False
        for sequence in self.running:
            if sequence.shrink_pages(len(sequence.token_ids), self._allocator):
                sequence.draft = NO_DRAFT
                was_freed = True
        return was_freed

    def _preempt_latest(self) -> Sequence:
        sequence = self.running.pop()
        sequence.release_pages(self._allocator)
        self.waiting.appendleft(sequence)
        logger.info("request %s is preempted: the KV cache is full", sequence.request_id)
        return sequence

    def _admit(self, prefilling: list[Sequence], budget: int) -> None:
        """Move waiting requests to `running` while there are places, tokens and pages for all they hold."""
        budget -= sum(s.num_uncomputed for s in prefilling)
        while self.waiting and budget > 0 and len(self.running) < self._batching.max_size:
            sequence = self.waiting[0]
            if not self._acquire_pages(sequence) and not (self._drop_draft_pages() and self._acquire_pages(sequence)):
                return
            self.waiting.popleft()
            self.running.append(sequence)
            prefilling.append(sequence)
            budget -= sequence.num_uncomputed

    def _acquire_pages(self, sequence: Sequence) -> bool:
        """Own pages for all tokens of a waiting request, cached ones first; False with nothing changed."""
        allocator = self._allocator
        num_tokens = len(sequence.token_ids)
        # The last token is computed in any case: its logits are what the request waits for.
        hashes = sequence.hashes((num_tokens - 1) // allocator.page_size, allocator.page_size)
        hits = allocator.acquire_prefix(hashes) if allocator.prefix_caching else []
        sequence.adopt_pages(hits, allocator)
        if not sequence.grow_pages(num_tokens, allocator):
            sequence.release_pages(allocator)
            return False
        sequence.num_registered_pages = len(hits)
        sequence.num_computed = len(hits) * allocator.page_size
        return True


def even_shares(wanted: list[int], budget: int) -> list[int]:
    """Cut `wanted` to a sum of at most `budget` by lowering the largest first; earlier entries get the rest."""
    if sum(wanted) <= budget:
        return wanted
    shares = [0] * len(wanted)
    remaining = budget
    while remaining > 0:
        open_entries = [i for i, want in enumerate(wanted) if shares[i] < want]
        step = max(1, remaining // len(open_entries))
        for i in open_entries:
            grant = min(step, wanted[i] - shares[i], remaining)
            shares[i] += grant
            remaining -= grant
    return shares
