"""One request inside the engine: its tokens, its pages, its pending draft and its counters. No torch."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dspark.engine.output import AppendResult, OutputProcessor
from dspark.engine.page_allocator import ROOT_HASH, PageAllocator, page_hash
from dspark.request import Request, RequestOutput, SpeculationStats, TokenLogprobs
from dspark.speculation.proposal import NO_DRAFT, Draft

if TYPE_CHECKING:  # policy runs without torch
    from dspark.speculation.logit_processing import LogitProcessor


@dataclass(kw_only=True, eq=False)  # compared by identity: the scheduler looks sequences up in its lists
class Sequence:
    """State of one accepted request. `token_ids[-1]` is the anchor: committed, but without KV yet.

    After every step of a decoding sequence `num_computed == len(token_ids) - 1`: the target's KV covers
    every committed token but the anchor. A smaller value means that prefill is still to be done.
    """

    request: Request
    output: OutputProcessor
    token_ids: list[int]  # prompt and committed output
    verification: str  # "rejection", "block" or "coupled"
    max_draft_tokens: int  # of the request and the settings, before any limit of the moment
    masked_token_ids: frozenset[int]  # must not come out before min_tokens
    seed: int
    logit_processor: LogitProcessor | None = None  # None: the target's logits are used as they are
    num_computed: int = 0  # leading tokens whose KV is in the pages
    page_ids: list[int] = field(default_factory=list)
    page_serials: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)  # of the leading full pages, computed so far
    num_registered_pages: int = 0  # leading pages known to the prefix cache
    draft: Draft = NO_DRAFT
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    was_admitted: bool = False
    shares_pages: bool = True  # False: its drafter's context has a gap, which no other request may inherit
    prompt_logprobs: list[TokenLogprobs] | None = None  # of token_ids[1:], so far; None: not wanted, or told already
    error: str | None = None  # why the request cannot go on; it ends with its next output
    first_token_time: float | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Committed tokens without KV: 1 while decoding, more while prefill is to be done."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_uncomputed == 1 and self.num_output_tokens > 0

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose log-probabilities are wanted and not there yet."""
        return 0 if self.prompt_logprobs is None else self.num_prompt_tokens - 1 - len(self.prompt_logprobs)

    @property
    def num_cacheable_tokens(self) -> int:
        """Leading tokens that may come from the prefix cache: those whose logits are not waited for."""
        if self.num_unscored:
            assert self.prompt_logprobs is not None
            return len(self.prompt_logprobs)  # the next prompt token is scored by the logits of the one before it
        return len(self.token_ids) - 1

    def take(self, token_ids: list[int]) -> AppendResult:
        """Show the output what verification let through, up to where the structure is complete if it has one."""
        structure = None if self.logit_processor is None else self.logit_processor.structure
        if structure is None:
            return self.output.append(token_ids)
        kept = token_ids[: structure.num_allowed(token_ids)]
        is_complete = structure.is_complete(kept)
        assert is_complete or len(kept) == len(token_ids), (kept, token_ids)
        return self.output.append(kept, completes_structure=is_complete)

    def commit(self, token_ids: list[int]) -> None:
        """Append tokens that are decided."""
        self.token_ids.extend(token_ids)
        if self.logit_processor is not None:
            self.logit_processor.follow(self.token_ids)

    def hashes(self, num_pages: int, page_size: int) -> list[bytes]:
        """Return the content hashes of the first `num_pages` full pages of committed tokens."""
        while len(self.page_hashes) < num_pages:
            start = len(self.page_hashes) * page_size
            parent = self.page_hashes[-1] if self.page_hashes else ROOT_HASH
            self.page_hashes.append(page_hash(parent, self.token_ids[start : start + page_size]))
        return self.page_hashes[:num_pages]

    def grow_pages(self, num_tokens: int, allocator: PageAllocator) -> bool:
        """Own pages for `num_tokens` positions; False, with nothing changed, when there are too few."""
        num_missing = -(-num_tokens // allocator.page_size) - len(self.page_ids)
        if num_missing <= 0:
            return True
        pages = allocator.allocate(num_missing)
        if pages is None:
            return False
        self.adopt_pages(pages, allocator)
        return True

    def adopt_pages(self, page_ids: list[int], allocator: PageAllocator) -> None:
        """Append pages that this sequence owns already."""
        self.page_ids.extend(page_ids)
        self.page_serials.extend(allocator.serial(page_id) for page_id in page_ids)

    def shrink_pages(self, num_tokens: int, allocator: PageAllocator) -> bool:
        """Give back the pages past `num_tokens` positions; True when there were any."""
        num_kept = -(-num_tokens // allocator.page_size)
        spare = self.page_ids[num_kept:]
        allocator.release(spare)
        del self.page_ids[num_kept:], self.page_serials[num_kept:]
        return bool(spare)

    def register_pages(self, allocator: PageAllocator) -> None:
        """Make the pages that are full of committed, computed tokens findable for other prompts."""
        num_full = min(self.num_computed, len(self.token_ids)) // allocator.page_size
        if num_full > self.num_registered_pages and self.shares_pages:
            hashes = self.hashes(num_full, allocator.page_size)
            for index in range(self.num_registered_pages, num_full):
                allocator.register(self.page_ids[index], hashes[index])
            self.num_registered_pages = num_full

    def release_pages(self, allocator: PageAllocator) -> None:
        """Give back everything; the sequence can be admitted again and then starts from its tokens."""
        allocator.release(self.page_ids)
        self.page_ids, self.page_serials = [], []
        self.num_computed = self.num_registered_pages = 0
        self.shares_pages = True  # whatever was missing is computed anew
        self.draft = NO_DRAFT

    def make_output(self) -> RequestOutput:
        """Return an output with the counts as they stand and no new tokens.

        The first one after all of the prompt was scored takes its log-probabilities along.
        """
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self.prompt_logprobs is not None and not self.num_unscored and self.error is None:
            prompt_logprobs, self.prompt_logprobs = [None, *self.prompt_logprobs], None
        return RequestOutput(
            request_id=self.request_id,
            prompt_logprobs=prompt_logprobs,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            # A copy, for other threads read it while this one counts on.
            speculation=replace(self.stats, max_draft_tokens=self.max_draft_tokens),
        )


def request_seed(request: Request) -> int:
    """Return the request's seed, or a fresh one so that unseeded requests differ from each other."""
    return request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
