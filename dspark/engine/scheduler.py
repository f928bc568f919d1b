"""Decides what one step computes: who runs, which prefill chunks, which draft prefixes. No torch.

Tokens go to each decoding request's next one, then to drafts and prefill, by halves while both want them. Pages go to
next tokens, then to drafts. Fair means: whoever runs gets a token every step; the rest come in order of arrival, those
sent back first; nobody passes one that does not fit, nor one whose prefill is under way; the oldest is never sent back.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from dspark.config import BatchingConfig
from dspark.engine.pace import Pace, StepSeconds, StepSize
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.sequence import Sequence
from dspark.speculation.planner import Load
from dspark.speculation.prefix_scheduler import even_shares
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
        """Whether the row reaches the last committed token, so that new tokens come out, if any are wanted."""
        return self.num_tokens == self.sequence.num_uncomputed and self.sequence.request.sampling.max_tokens != 0

    @property
    def is_round(self) -> bool:
        """Whether the row decodes rather than ends a prefill. Ask before the sequence grows."""
        return self.sequence.num_output_tokens > 0 and self.num_tokens == 1


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """The rows of one step, and the requests that lost their place for it."""

    rows: list[ScheduledRow]
    preempted: list[Sequence]


# Chooses how many drafted tokens of each decoding request a step verifies, from 0 to the length of its draft. Called
# once for every step in which any decode; with these lengths the step must not exceed `Load.max_tokens`.
PlanLengths = Callable[[list[Sequence], Load], list[int]]


def verify_all(decoding: list[Sequence], load: Load) -> list[int]:
    """Verify whole drafts, sharing short room evenly: the plan that knows nothing of chances and costs."""
    return even_shares([len(s.draft.token_ids) for s in decoding], load.room)


def _one_token() -> float:
    return 1.0


class Scheduler:
    """Owns the waiting queue and the running list; the engine owns what happens to them.

    `step_s` predicts the seconds of a whole step and `tokens_per_step` says what a decoding request gets from one, on
    average and lately: they bound prefill chunks and, with a target time per token, admission. `clock` is that of
    `Request.arrival_time`.
    """

    def __init__(
        self,
        batching: BatchingConfig,
        allocator: PageAllocator,
        *,
        plan_lengths: PlanLengths = verify_all,
        step_s: StepSeconds | None = None,
        tokens_per_step: Callable[[], float] = _one_token,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._batching = batching
        self._min_size, self._max_wait_s = batching.min_size, batching.max_wait_s
        self._allocator = allocator
        self._plan_lengths = plan_lengths
        self._pace = Pace(step_s, tokens_per_step=tokens_per_step, target_tpot_s=batching.target_tpot_s)
        self._clock = clock

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

    @property
    def wait_s(self) -> float:
        """Seconds for which `schedule` has nothing to do although requests wait, unless more arrive; mostly 0."""
        return 0.0 if self.running else self._hold_s()

    def schedule(self) -> ScheduledStep:
        """Choose the rows of the next step and own the pages they write. No rows: ask again after `wait_s`."""
        preempted = self._secure_next_tokens()
        # A request that was sent back must not be overtaken in the same step.
        if not preempted and self._hold_s() == 0.0:
            self._admit()
        decoding = [s for s in self.running if s.is_decoding]
        prefilling = [s for s in self.running if not s.is_decoding]
        load = self._load(decoding, prefilling, sum(len(s.draft.token_ids) for s in decoding))
        lengths = self._choose_lengths(decoding, load) if decoding else []
        rows = [
            ScheduledRow(sequence=s, num_tokens=1, draft=s.draft.prefix(length))
            for s, length in zip(decoding, lengths, strict=True)
        ]
        return ScheduledStep(rows=rows + _chunks(prefilling, load.num_prefill_tokens), preempted=preempted)

    def coming_load(self) -> Load:
        """Return what the next step will probably hold besides drafts, for those who decide now what to draft for it.

        That is, if drafts take all they may and those who wait find pages.
        """
        decoding = [s for s in self.running if s.is_decoding]
        max_tokens, max_size = self._batching.max_batch_tokens, self._batching.max_size
        places = max(0, (max_tokens if max_size is None else max_size) - len(self.running))
        prefilling = chain((s for s in self.running if not s.is_decoding), islice(self.waiting, places))
        return self._load(decoding, list(prefilling), max_tokens)

    def _hold_s(self) -> float:
        """Return the seconds for which waiting requests are still kept back, so that more may share their first step.

        Only those who wait are kept back, never those who run.
        """
        if not self.waiting or len(self.running) + len(self.waiting) >= self._min_size:
            return 0.0
        waited_s = self._clock() - self.waiting[0].request.arrival_time
        # An arrival in the future is another clock's, which must not keep anyone waiting.
        return self._max_wait_s - waited_s if 0.0 <= waited_s < self._max_wait_s else 0.0

    def _load(self, decoding: list[Sequence], prefilling: list[Sequence], num_drafted: int) -> Load:
        """Decide how much is prefilled: what drafts leave, half at least, as far as the pace of who decodes allows."""
        spans = [(s.num_computed, s.num_uncomputed) for s in prefilling]
        anchors = StepSize().plus((s.num_computed, 1) for s in decoding)
        max_tokens = self._batching.max_batch_tokens
        budget = max_tokens - len(decoding)
        share = min(max(budget - budget // 2, budget - num_drafted), sum(num for _, num in spans))
        num_prefill_tokens = self._pace.max_prefill_tokens(anchors, spans, share)
        return Load(
            num_decoding=len(decoding),
            num_prefill_tokens=num_prefill_tokens,
            max_tokens=max_tokens,
            context_len=anchors.plus(spans, num_prefill_tokens).context_len,
        )

    def _choose_lengths(self, decoding: list[Sequence], load: Load) -> list[int]:
        lengths = self._plan_lengths(decoding, load)
        drafted = [len(s.draft.token_ids) for s in decoding]
        are_prefixes = len(lengths) == len(drafted) and all(0 <= n <= k for n, k in zip(lengths, drafted, strict=True))
        assert are_prefixes and sum(lengths) <= load.room, (lengths, drafted, load)
        self._pace.observe(len(decoding), sum(lengths))
        return lengths

    def _secure_next_tokens(self) -> list[Sequence]:
        """Give each decoding request a page for its anchor, dropping drafts and then the latest requests."""
        preempted: list[Sequence] = []
        for sequence in list(self.running):
            while sequence in self.running and not sequence.grow_pages(len(sequence.token_ids), self._allocator):
                if not self._drop_draft_pages():
                    preempted.append(self._preempt_latest())
        return preempted

    def _num_draft_pages(self) -> int:
        """Return how many pages `_drop_draft_pages` would free."""
        page_size = self._allocator.page_size
        return sum(len(s.page_ids) - -(-len(s.token_ids) // page_size) for s in self.running)

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

    def _admit(self) -> None:
        """Move waiting requests to `running` while there are places, tokens, pages for all they hold, and time."""
        budget = self._batching.max_batch_tokens - sum(s.num_uncomputed for s in self.running)
        max_size = self._batching.max_size
        while self.waiting and budget > 0 and (max_size is None or len(self.running) < max_size):
            sequence = self.waiting[0]
            if not self._pace.has_room_for(len(s.token_ids) for s in chain(self.running, [sequence])):
                return
            if not self._acquire_pages(sequence):
                return
            self.waiting.popleft()
            self.running.append(sequence)
            budget -= sequence.num_uncomputed

    def _acquire_pages(self, sequence: Sequence) -> bool:
        """Own pages for all tokens of a waiting request, cached ones first, drafts giving way where that is enough.

        False with nothing changed.
        """
        allocator = self._allocator
        num_tokens = len(sequence.token_ids)
        hashes = sequence.hashes(sequence.num_cacheable_tokens // allocator.page_size, allocator.page_size)
        hits = allocator.acquire_prefix(hashes) if allocator.prefix_caching else []
        sequence.adopt_pages(hits, allocator)
        num_missing = -(-num_tokens // allocator.page_size) - len(hits)
        if allocator.num_available < num_missing <= allocator.num_available + self._num_draft_pages():
            self._drop_draft_pages()
        if not sequence.grow_pages(num_tokens, allocator):
            sequence.release_pages(allocator)
            return False
        sequence.num_registered_pages = len(hits)
        sequence.num_computed = len(hits) * allocator.page_size
        return True


def _chunks(prefilling: list[Sequence], num_tokens: int) -> list[ScheduledRow]:
    """Return the prefill rows: so many tokens, those of earlier requests first."""
    rows = []
    for sequence in prefilling:
        if num_tokens == 0:
            break
        rows.append(ScheduledRow(sequence=sequence, num_tokens=min(sequence.num_uncomputed, num_tokens)))
        num_tokens -= rows[-1].num_tokens
    return rows
