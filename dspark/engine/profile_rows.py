"""Rows of passes to be timed, shaped like those of decoding: requests with pages of their own and drafts to verify.

The pages touched are bounded: where more requests are wanted than they hold contexts for, requests read the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dspark.batch import BatchRow

ROW_TOKENS = 6  # of a request alone: an anchor and five drafted tokens
# Larger steps are those of more requests with fewer drafts each, until 1.5 tokens a request. Each request costs
# attention of its own: passes of 16 tokens took 52 ms for 16 requests and 45 ms for three.
TOKENS_PER_MORE_ROW = 1.5
SHORT_CONTEXT_LEN, LONG_CONTEXT_LEN = 128, 1024  # about; as far as the cache and the model allow
# 280 MB of the embedded model: long contexts of six requests, which no cache near the cores holds. Pools take memory
# only where they are touched, and a start must not take all of it.
MAX_TOUCHED_TOKENS = 6144
MAX_TOUCHED_PAGES = 512  # touching one costs a token's pass, which many tiny pages would make long
# Contexts of drafting passes: a draft model has to read them first.
MAX_DRAFT_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class ProfileLimits:
    """What an engine's passes may hold."""

    max_batch_tokens: int  # tokens of a target pass
    max_size: int  # requests of a pass
    max_model_len: int  # tokens of a request
    num_pages: int
    page_size: int
    num_draft_tokens: int  # of each request in a drafting pass; 0: nobody drafts

    @property
    def context_lens(self) -> tuple[int, int]:
        """The two context lengths; the longer is 0 where there is room for one only."""
        room = min(self.max_model_len, self.num_pages * self.page_size)
        short = self._mid_page(min(SHORT_CONTEXT_LEN, room // 4))
        long = self._mid_page(min(LONG_CONTEXT_LEN, room // 2))
        return short, long if long > short > 0 else 0

    @property
    def num_touched_pages(self) -> int:
        """How many pages to touch, where time allows."""
        return min(self.num_pages, MAX_TOUCHED_PAGES, max(16, MAX_TOUCHED_TOKENS // self.page_size))

    def num_rows(self, num_tokens: int) -> int:
        """Return how many requests share a pass of so many tokens, where pages allow."""
        wanted = 1 + math.ceil(max(0, num_tokens - ROW_TOKENS) / TOKENS_PER_MORE_ROW)
        return min(self.max_size, wanted)

    def _mid_page(self, num_tokens: int) -> int:
        """Return about `num_tokens`, not more: half a page is left, for a step of a request seldom begins a page."""
        num_whole = num_tokens // self.page_size - 1
        return num_tokens if num_whole < 0 else num_whole * self.page_size + self.page_size // 2


class ProfileRows:
    """Makes rows over the pages 0 .. num_pages - 1."""

    def __init__(self, limits: ProfileLimits, *, num_pages: int) -> None:
        self._limits = limits
        self._num_pages = num_pages

    def decoding(self, num_tokens: int, context_len: int) -> list[BatchRow] | None:
        """Return rows of so many tokens in all, shared as in production; None if they cannot be held."""
        for num_rows in range(self._limits.num_rows(num_tokens), 0, -1):
            longest = -(-num_tokens // num_rows)
            tables = self._tables(num_rows, context_len, longest, self._num_pages)
            if tables is not None:
                break
        else:
            return None
        num_longest = num_tokens - num_rows * (longest - 1)
        lengths = [longest] * num_longest + [longest - 1] * (num_rows - num_longest)
        return [
            BatchRow(token_ids=[0] * length, start_position=context_len, page_ids=table, num_logits=length)
            for length, table in zip(lengths, tables, strict=True)
        ]

    def drafting_tables(self, num_requests: int, context_len: int) -> list[list[int]] | None:
        """Return a page table per request for a text of `context_len` tokens, an anchor and its draft, or None."""
        num_context_pages = max(1, MAX_DRAFT_TOKENS // self._limits.page_size)
        return self._tables(num_requests, context_len, 1 + self._limits.num_draft_tokens, num_context_pages)

    def _tables(
        self, num_rows: int, context_len: int, num_tokens: int, max_context_pages: int
    ) -> list[list[int]] | None:
        """Return tables whose last pages, those of `num_tokens` after the context, belong to one row each."""
        limits, size = self._limits, self._limits.page_size
        num_shared = context_len // size  # pages of a context, read only
        num_own = -(-(context_len + num_tokens) // size) - num_shared
        num_left = self._num_pages - num_rows * num_own
        if context_len + num_tokens > limits.max_model_len or num_left < min(1, num_shared):
            return None
        num_contexts = min(num_left, max_context_pages)
        return [
            [(row * num_shared + page) % num_contexts for page in range(num_shared)]
            + [num_left + row * num_own + page for page in range(num_own)]
            for row in range(num_rows)
        ]
