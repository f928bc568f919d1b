"""Engines over the tiny target with DSpark drafters, and drafts of fresh runs to compare theirs with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from drafter_cases import CPU, FIXTURES, PAGE_SIZE, PagedContext, load, make_config, make_tensors, tiny_target
from torch import Tensor
from toys import WordTokenizer

from dspark.batch import BatchRow, build_forward_batch
from dspark.config import BatchingConfig, CacheConfig, EngineConfig, SpeculationConfig
from dspark.engine.engine import Engine
from dspark.engine.guard import FaultLimits
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.runner import Runner
from dspark.models.drafter import Drafter
from dspark.models.drafter_attention import DraftRow
from dspark.models.kv_cache import KVCache
from dspark.models.tokenizer import GenerationDefaults
from dspark.speculation.dspark_drafter import DSparkProposer
from dspark.speculation.proposal import CommittedFeatures, Draft, DraftContext, Proposer

VOCAB = 256


def make_drafter(**changes: object) -> Drafter:
    """Return a random drafter for the tiny target."""
    config = make_config(**changes)
    return Drafter(config, make_tensors(config))


def stored_drafter(name: str) -> Drafter:
    return load(FIXTURES / name)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One draft with the context it was made for, as it was then."""

    context: DraftContext
    token_ids: list[int]
    draft: Draft


class RecordingProposer(DSparkProposer):
    """Records all drafts and features. `correct` may replace what the engine gets, so that drafts are accepted."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        num_pages: int = 64,
        page_size: int = PAGE_SIZE,
        correct: Callable[[DraftContext, Draft], Draft] | None = None,
    ) -> None:
        super().__init__(drafter, num_pages=num_pages, page_size=page_size)
        self.drafter = drafter
        self.recorded: list[Recorded] = []
        self.taken: list[CommittedFeatures] = []
        self._correct = correct

    def take_features(self, committed: CommittedFeatures) -> None:
        self.taken.append(committed)
        super().take_features(committed)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = super().propose(contexts)
        for context, draft in zip(contexts, drafts, strict=True):
            if context.joins_pass:
                self.recorded.append(Recorded(context=context, token_ids=list(context.token_ids), draft=draft))
        if self._correct is None:
            return drafts
        return [self._correct(context, draft) for context, draft in zip(contexts, drafts, strict=True)]


def engine_over(
    proposer: Proposer | None,
    *,
    num_draft_tokens: int | None = None,
    num_pages: int = 64,
    max_batch_size: int = 6,
    max_batch_tokens: int = 32,
    chunk: int | None = None,
    verification: str = "rejection",
    runner_type: type[Runner] = Runner,
    fault_limits: FaultLimits | None = None,
    tokenizer: Any = None,
) -> Engine:
    """Return an engine over the tiny target; `chunk` is a token budget below what settings allow."""
    engine = Engine(
        runner=runner_type(
            tiny_target(),
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            tapped_layers=() if proposer is None else proposer.tapped_layers,
        ),
        tokenizer=tokenizer or WordTokenizer(VOCAB),
        allocator=PageAllocator(num_pages, PAGE_SIZE),
        vocab_size=VOCAB,
        max_model_len=128,
        config=EngineConfig(
            model="toy",
            speculation=SpeculationConfig(num_draft_tokens=num_draft_tokens, verification=verification),
            batching=BatchingConfig(max_size=max_batch_size, max_batch_tokens=max_batch_tokens),
            cache=CacheConfig(page_size=PAGE_SIZE),
        ),
        generation_defaults=GenerationDefaults(eos_token_ids=frozenset()),
        proposer=proposer,
        fault_limits=fault_limits,
    )
    if chunk is not None:
        engine.scheduler._batching = SimpleNamespace(max_size=max_batch_size, max_batch_tokens=chunk)
    return engine


@torch.inference_mode()
def target_taps(token_ids: Sequence[int], tapped_layers: Sequence[int]) -> Tensor:
    """Return what one uninterrupted pass over `token_ids` gives."""
    target = tiny_target()
    num_pages = -(-len(token_ids) // PAGE_SIZE)
    cache = KVCache(target.config, num_pages, PAGE_SIZE, target.dtype, CPU)
    row = BatchRow(token_ids=token_ids, start_position=0, page_ids=range(num_pages))
    taps = target.forward(build_forward_batch([row], page_size=PAGE_SIZE), cache, tapped_layers=tapped_layers)[1]
    assert taps is not None
    return taps


def fresh_context(drafter: Drafter, token_ids: Sequence[int]) -> tuple[PagedContext, DraftRow]:
    """Return a new pool with the context of a text, whose last token is the anchor, and the row to draft."""
    context = PagedContext.of(drafter)
    anchor = len(token_ids) - 1
    context.write(target_taps(token_ids[:-1], drafter.config.tap_ids), torch.arange(anchor), range(64))
    return context, DraftRow(anchor_token_id=token_ids[-1], anchor_position=anchor, page_ids=range(64))


def fresh_greedy_draft(drafter: Drafter, token_ids: Sequence[int], length: int) -> list[int]:
    """Return the greedy draft of a run that saw nothing but this text, drafted by the slow reference loop."""
    context, row = fresh_context(drafter, token_ids)
    return context.draft([row]).target_ids[0, :length].tolist()


def assert_drafts_are_fresh(proposer: RecordingProposer) -> int:
    """Compare every recorded greedy draft with that of a fresh run of its text; return how many there were."""
    seen: set[tuple[int, ...]] = set()
    for recorded in proposer.recorded:
        if tuple(recorded.token_ids) in seen:
            continue
        seen.add(tuple(recorded.token_ids))
        length = recorded.context.num_draft_tokens
        expected = fresh_greedy_draft(proposer.drafter, recorded.token_ids, length)
        assert recorded.draft.token_ids == expected, (recorded.context.request_id, len(recorded.token_ids))
    return len(seen)
