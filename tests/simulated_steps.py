"""The scheduler alone on a simulated clock: requests, pages and drafts are real, the model is a cost in seconds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from dspark.config import BatchingConfig
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.scheduler import ScheduledRow, Scheduler
from dspark.engine.sequence import Sequence
from dspark.request import Request
from dspark.speculation.proposal import NO_DRAFT, Draft


class SimulatedSteps:
    """Runs steps as the engine does; every request accepts `num_accepted` of the drafted tokens that are verified."""

    def __init__(
        self,
        batching: BatchingConfig | None = None,
        *,
        num_pages: int = 4096,
        page_size: int = 4,
        num_draft_tokens: int = 0,
        num_accepted: int = 0,
        seconds: Callable[[int], float] = lambda num_tokens: 0.001,
        **policy,
    ) -> None:
        self.now = 100.0
        self.batching = batching or BatchingConfig()
        self.allocator = PageAllocator(num_pages, page_size)
        self.scheduler = Scheduler(self.batching, self.allocator, clock=lambda: self.now, **policy)
        self.num_draft_tokens, self.num_accepted, self.seconds = num_draft_tokens, num_accepted, seconds
        self.num_tokens_left: dict[str, int] = {}
        self.token_times: dict[str, list[float]] = {}
        self.started: list[str] = []  # in the order of their first row
        self.num_preempted = 0

    def add(self, request_id: str, prompt_len: int, num_tokens: int = 10, *, arrival_time: float | None = None):
        start = 1000 * len(self.num_tokens_left)  # no two prompts share pages
        sequence = Sequence(
            request=Request(
                request_id=request_id,
                prompt_token_ids=range(start, start + prompt_len),
                arrival_time=self.now if arrival_time is None else arrival_time,
            ),
            output=SimpleNamespace(),
            token_ids=list(range(start, start + prompt_len)),
            verification="rejection",
            max_draft_tokens=self.num_draft_tokens,
            masked_token_ids=frozenset(),
            seed=0,
        )
        self.num_tokens_left[request_id] = num_tokens
        self.token_times[request_id] = []
        self.scheduler.add(sequence)
        return sequence

    @property
    def running(self) -> list[str]:
        return [s.request_id for s in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [s.request_id for s in self.scheduler.waiting]

    def step(self) -> list[ScheduledRow]:
        """Run one step, check what always holds, and return its rows."""
        decoding = {s.request_id for s in self.scheduler.running if s.is_decoding}
        step = self.scheduler.schedule()
        self.num_preempted += len(step.preempted)
        decoding -= {s.request_id for s in step.preempted}
        # Case J13: only what goes beyond the next token is competed for.
        assert decoding <= {row.sequence.request_id for row in step.rows if row.is_sampled}
        num_tokens = sum(row.num_tokens + len(row.draft.token_ids) for row in step.rows)
        assert num_tokens <= self.batching.max_batch_tokens
        if step.rows:
            self.now += self.seconds(num_tokens)
        sampled = [row for row in step.rows if row.is_sampled]
        for row in step.rows:
            self.started += [row.sequence.request_id] * (row.sequence.request_id not in self.started)
            row.sequence.num_computed += row.num_tokens
        for row in sampled:
            self._commit(row)
        self._draft()
        self.allocator.check_integrity(s.page_ids for s in self.scheduler)
        return step.rows

    def _commit(self, row: ScheduledRow) -> None:
        sequence = row.sequence
        sequence.draft = NO_DRAFT
        left = self.num_tokens_left[sequence.request_id]
        num_accepted = min(self.num_accepted, len(row.draft.token_ids))
        assert num_accepted < left, "a draft is never longer than what is left after the next token"
        sequence.token_ids += [-1] * (num_accepted + 1)
        sequence.num_computed += num_accepted
        self.token_times[sequence.request_id] += [self.now] * (num_accepted + 1)
        self.num_tokens_left[sequence.request_id] = left - num_accepted - 1
        sequence.register_pages(self.allocator)
        if left == num_accepted + 1:
            self.scheduler.remove(sequence)

    def _draft(self) -> None:
        for sequence in self.scheduler.running:
            length = min(self.num_draft_tokens, self.num_tokens_left[sequence.request_id] - 1)
            if not sequence.is_decoding or length <= 0:
                continue
            num_tokens = len(sequence.token_ids)
            if not sequence.grow_pages(num_tokens + length, self.allocator):
                length = len(sequence.page_ids) * self.allocator.page_size - num_tokens
            sequence.draft = Draft(token_ids=[-2] * length) if length > 0 else NO_DRAFT

    def drain(self, max_steps: int = 10_000) -> None:
        """Run until nobody is left; no step may be empty."""
        for _ in range(max_steps):
            if not self.scheduler.running and not self.scheduler.waiting:
                break
            assert self.step(), "a step without rows although requests wait"
        assert not list(self.scheduler), f"not done after {max_steps} steps"
        assert self.allocator.num_used == 0, "pages leak"
