"""A draft model whose answer depends on every slot it reads, so that one wrong KV entry changes its drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.batch import BatchRow
from dspark.request import SamplingParams
from dspark.speculation.draft_model import DraftModelProposer
from dspark.speculation.proposal import Draft, DraftContext

GREEDY = SamplingParams(temperature=0)
MASK = 2**61 - 1
GARBAGE = 987654321


def chained(previous: int, token_id: int) -> int:
    """Return the KV entry of a token: it depends on all tokens before it, as in a transformer."""
    return ((previous + 7) * 1_000_003 + token_id * 2_654_435_761 + 12_345) & MASK


class FakeDraftModel:
    """Writes one number per token into a paged pool and computes logits from the whole context read back from it."""

    def __init__(self, *, vocab_size: int = 32, num_pages: int = 64, page_size: int = 4) -> None:
        self.vocab_size = vocab_size
        self.page_size = page_size
        self.num_pages = num_pages
        self.pool = np.full(num_pages * page_size, GARBAGE, dtype=np.int64)
        self.passes: list[list[int]] = []  # tokens of each row, per pass
        self.fail_on_pass: int | None = None
        self.nan_on_pass: int | None = None

    @property
    def num_fed(self) -> int:
        return sum(sum(lengths) for lengths in self.passes)

    def execute(self, rows: Sequence[BatchRow]) -> Tensor:
        self.passes.append([len(row.token_ids) for row in rows])
        logits = []
        for row in rows:
            logits.extend(self._execute_row(row))
        if self.fail_on_pass == len(self.passes) - 1:
            raise RuntimeError("the device is gone")
        if not logits:
            return torch.empty(0, self.vocab_size)
        stacked = torch.stack(logits)
        return stacked * torch.nan if self.nan_on_pass == len(self.passes) - 1 else stacked

    def _execute_row(self, row: BatchRow) -> list[Tensor]:
        entries = [int(self.pool[self._slot(row, position)]) for position in range(row.start_position)]
        logits = []
        is_failing = len(self.passes) - 1 in (self.fail_on_pass, self.nan_on_pass)
        for k, token_id in enumerate(row.token_ids):
            entries.append(chained(entries[-1] if entries else 0, token_id))
            written = GARBAGE if is_failing else entries[-1]
            self.pool[self._slot(row, row.start_position + k)] = written
            if k >= len(row.token_ids) - row.num_logits:
                logits.append(self._logits(entries))
        return logits

    def _slot(self, row: BatchRow, position: int) -> int:
        return row.page_ids[position // self.page_size] * self.page_size + position % self.page_size

    def _logits(self, entries: Sequence[int]) -> Tensor:
        seed = 0
        for entry in entries:
            seed = (seed * 31 + entry) & MASK
        return torch.from_numpy(np.random.default_rng(seed).normal(size=self.vocab_size).astype(np.float32) * 2)

    def reference_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits after `token_ids`, computed without any cache."""
        entries: list[int] = []
        for token_id in token_ids:
            entries.append(chained(entries[-1] if entries else 0, token_id))
        return self._logits(entries)

    def greedy(self, token_ids: Sequence[int], num_tokens: int, *, vocab_size: int | None = None) -> list[int]:
        """Return the greedy continuation, computed without any cache."""
        text = list(token_ids)
        for _ in range(num_tokens):
            text.append(int(self.reference_logits(text)[:vocab_size].argmax()))
        return text[len(token_ids) :]


class FakeRequest:
    """One request with pages from a shuffled pool; what the engine would keep."""

    def __init__(
        self, name: str, token_ids: Sequence[int], allocator: FakeAllocator, shared: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.token_ids = list(token_ids)
        self.allocator = allocator
        self.page_ids = list(shared)
        self.page_serials = [allocator.serials[page_id] for page_id in shared]

    def context(
        self,
        num_draft_tokens: int = 4,
        *,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        is_coupled: bool = False,
    ) -> DraftContext:
        num_pages = -(-(len(self.token_ids) + num_draft_tokens) // self.allocator.page_size)
        while len(self.page_ids) < num_pages:
            self.page_ids.append(self.allocator.take())
            self.page_serials.append(self.allocator.serials[self.page_ids[-1]])
        return DraftContext(
            request_id=self.name,
            token_ids=self.token_ids,
            sampling=sampling,
            seed=seed,
            is_coupled=is_coupled,
            num_draft_tokens=num_draft_tokens,
            page_ids=self.page_ids,
            page_serials=self.page_serials,
        )

    def give_back(self) -> None:
        self.allocator.free.extend(self.page_ids)
        self.page_ids, self.page_serials = [], []


class FakeAllocator:
    """Hands out pages in a shuffled order, each time under a new serial."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free = np.random.default_rng(0).permutation(num_pages).tolist()
        self.serials = [0] * num_pages
        self._last_serial = 0

    def take(self) -> int:
        page_id = self.free.pop()
        self._last_serial += 1
        self.serials[page_id] = self._last_serial
        return page_id


class DraftBench:
    """A fake model, its proposer and an allocator over the same pages."""

    def __init__(
        self,
        *,
        model_vocab_size: int = 32,
        vocab_size: int = 32,
        max_model_len: int = 1000,
        max_batch_tokens: int = 512,
        num_pages: int = 64,
        page_size: int = 4,
    ) -> None:
        self.model = FakeDraftModel(vocab_size=model_vocab_size, num_pages=num_pages, page_size=page_size)
        self.allocator = FakeAllocator(num_pages, page_size)
        self.proposer = DraftModelProposer(
            self.model.execute,
            vocab_size=vocab_size,
            draft_vocab_size=model_vocab_size,
            max_model_len=max_model_len,
            num_pages=num_pages,
            page_size=page_size,
            max_batch_tokens=max_batch_tokens,
        )

    def request(self, name: str, token_ids: Sequence[int], shared: Sequence[int] = ()) -> FakeRequest:
        return FakeRequest(name, token_ids, self.allocator, shared)

    def propose(self, *requests: FakeRequest, **fields: object) -> list[Draft]:
        return self.proposer.propose([request.context(**fields) for request in requests])  # type: ignore[arg-type]

    def draft(self, request: FakeRequest, **fields: object) -> list[int]:
        return self.propose(request, **fields)[0].token_ids

    def num_fed_by(self, action) -> int:  # type: ignore[no-untyped-def]
        """Return how many tokens the model is fed while `action` runs."""
        before = self.model.num_fed
        action()
        return self.model.num_fed - before
