"""Toy targets and drafters. A toy target keeps token ids in its paged pool and answers from what it READS there,
so that any mistake in page tables, slots or rollback changes its text."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from dspark.batch import BatchRow
from dspark.config import BatchingConfig, CacheConfig, EngineConfig, SpeculationConfig
from dspark.engine.engine import Engine
from dspark.engine.guard import FaultLimits
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.runner import TargetRunner
from dspark.models.tokenizer import GenerationDefaults
from dspark.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs, TokenOrigin
from dspark.speculation.planner import Planner
from dspark.speculation.proposal import Draft, DraftContext, Proposer

Rule = Callable[[tuple[int, ...]], np.ndarray]  # committed tokens -> logits [V]


def cycle_rule(vocab_size: int, modulus: int) -> Rule:
    """T-cycle: after t comes (t + 1) mod `modulus`, with certainty."""

    def logits(context: tuple[int, ...]) -> np.ndarray:
        row = np.full(vocab_size, -1e4, dtype=np.float32)
        row[(context[-1] + 1) % modulus] = 0.0
        return row

    return logits


def table_rule(probs: Sequence[Sequence[float]] | Sequence[float]) -> Rule:
    """T-table: a known distribution, the same everywhere ([V]) or by the previous token ([V, V])."""
    with np.errstate(divide="ignore"):
        table = np.log(np.asarray(probs, dtype=np.float64)).astype(np.float32)
    return lambda context: table if table.ndim == 1 else table[context[-1]]


def hashed_rule(vocab_size: int, scale: float = 2.0) -> Rule:
    """Random logits that depend on every token of the context."""

    def logits(context: tuple[int, ...]) -> np.ndarray:
        seed = zlib.crc32(np.asarray(context, dtype=np.int64).tobytes())
        return (scale * np.random.default_rng(seed).standard_normal(vocab_size)).astype(np.float32)

    return logits


class ToyRunner:
    """A target whose "KV" of a position is the token that stood there."""

    def __init__(self, rule: Rule, vocab_size: int, *, num_pages: int, page_size: int) -> None:
        self.rule = rule
        self.vocab_size = vocab_size
        self.page_size = page_size
        self.pool = np.full(num_pages * page_size, -1, dtype=np.int64)
        self.num_passes = 0
        self.rows_per_pass: list[list[BatchRow]] = []
        self.contexts: list[tuple[int, ...]] = []  # of each token of the last pass

    def execute(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        self.num_passes += 1
        self.rows_per_pass.append(list(rows))
        self.contexts = []
        logits = []
        for row in rows:
            end = row.start_position + len(row.token_ids)
            assert len(row.page_ids) * self.page_size >= end, (len(row.page_ids), end)
            slots = [row.page_ids[p // self.page_size] * self.page_size + p % self.page_size for p in range(end)]
            for token_id, slot in zip(row.token_ids, slots[row.start_position :], strict=True):
                assert 0 <= token_id < self.vocab_size, token_id
                self.pool[slot] = token_id
            context = tuple(int(t) for t in self.pool[slots])
            assert min(context) >= 0, "a slot is read that was never written"
            self.contexts += [context[: row.start_position + k + 1] for k in range(len(row.token_ids))]
            logits += [self.rule(context[: end - row.num_logits + 1 + k]) for k in range(row.num_logits)]
        return torch.from_numpy(np.stack(logits)) if logits else torch.empty(0, self.vocab_size)

    def logits_of(self, token_indices: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.stack([self.rule(self.contexts[i]) for i in token_indices]))


class FunctionProposer(Proposer):
    """Drafts what `draft(context)` returns, cut to the allowed length; remembers every context it saw."""

    name = "function"

    def __init__(self, draft: Callable[[DraftContext], Draft | Sequence[int]]) -> None:
        self._draft = draft
        self.released: list[str] = []
        self.lengths: list[int] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = []
        for context in contexts:
            self.lengths.append(context.num_draft_tokens)
            draft = self._draft(context)
            draft = draft if isinstance(draft, Draft) else Draft(token_ids=list(draft))
            drafts.append(draft.prefix(context.num_draft_tokens))
        return drafts

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def greedy_continuation(rule: Rule, token_ids: Sequence[int], length: int) -> list[int]:
    context = tuple(token_ids)
    for _ in range(length):
        context += (int(np.argmax(rule(context))),)
    return list(context[len(token_ids) :])


def perfect_proposer(rule: Rule) -> FunctionProposer:
    """D-perfect: what the greedy target would say."""
    return FunctionProposer(lambda c: greedy_continuation(rule, c.token_ids, c.num_draft_tokens))


def never_right_proposer(rule: Rule, vocab_size: int) -> FunctionProposer:
    """D-never: always one id beside the greedy target's."""
    return FunctionProposer(
        lambda c: [(t + 1) % vocab_size for t in greedy_continuation(rule, c.token_ids, c.num_draft_tokens)]
    )


def right_until_proposer(rule: Rule, vocab_size: int, num_right: int) -> FunctionProposer:
    """Right for `num_right` positions, wrong after."""

    def draft(context: DraftContext) -> list[int]:
        tokens = greedy_continuation(rule, context.token_ids, context.num_draft_tokens)
        return tokens[:num_right] + [(t + 1) % vocab_size for t in tokens[num_right:]]

    return FunctionProposer(draft)


def random_proposer(vocab_size: int, seed: int = 0) -> FunctionProposer:
    """Random ids and random lengths, none included."""
    generator = np.random.default_rng(seed)
    return FunctionProposer(
        lambda c: generator.integers(0, vocab_size, generator.integers(0, c.num_draft_tokens + 1)).tolist()
    )


def soft_proposer(rule: Rule, vocab_size: int) -> FunctionProposer:
    """A drafter with a distribution of its own at each position, drawn as the rules of the request ask."""
    from dspark.speculation.noise import KeyedNoise, NoisePurpose
    from dspark.speculation.sampling import race, sample_from, target_probs

    def draft(context: DraftContext) -> Draft:
        noise = KeyedNoise(context.seed)
        text, anchor = tuple(context.token_ids), len(context.token_ids) - 1
        probs = []
        for k in range(context.num_draft_tokens):
            logits = torch.from_numpy(0.5 * rule(text) + 0.3 * np.arange(vocab_size, dtype=np.float32))[None]
            q = target_probs(logits, [context.sampling])[0][0]
            if context.is_coupled:
                token_id = race(q, noise.exponential(anchor + 1 + k, vocab_size))
            else:
                uniform = noise.uniform(NoisePurpose.PROPOSAL, anchor_position=anchor, position=anchor + 1 + k)
                token_id = sample_from(q, uniform)
            probs.append(q)
            text += (token_id,)
        tokens = list(text[len(context.token_ids) :])
        return Draft(token_ids=tokens, probs=None if context.sampling.is_greedy else torch.stack(probs))

    return FunctionProposer(draft)


class WordTokenizer:
    """Ids 0 .. V-1 are the words "t0", "t1", ...; decoding glues them together without spaces."""

    has_chat_template = False
    chat_template = tool_chat_template = None
    takes_tools = False
    bos_token_id = None
    special_token_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int, words: Sequence[str] | None = None) -> None:
        words = words or [f"t{i}" for i in range(vocab_size)]
        self.vocab_size = vocab_size
        self.backend = BackendTokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
        self.backend.decoder = Fuse()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def make_engine(
    rule: Rule,
    vocab_size: int,
    *,
    proposer: Proposer | None = None,
    num_draft_tokens: int = 5,
    verification: str = "rejection",
    page_size: int = 4,
    num_pages: int = 64,
    max_model_len: int = 128,
    max_batch_size: int = 8,
    max_batch_tokens: int = 64,
    prefix_caching: bool = True,
    eos_token_ids: Sequence[int] = (),
    words: Sequence[str] | None = None,
    fallback_strategy: str = "auto",
    runner: TargetRunner | None = None,
    planner: Planner | None = None,
    tokenizer: Any = None,
    fault_limits: FaultLimits | None = None,
) -> Engine:
    return Engine(
        runner=runner or ToyRunner(rule, vocab_size, num_pages=num_pages, page_size=page_size),
        tokenizer=tokenizer or WordTokenizer(vocab_size, words),
        allocator=PageAllocator(num_pages, page_size, prefix_caching=prefix_caching),
        vocab_size=vocab_size,
        max_model_len=min(max_model_len, num_pages * page_size),
        config=EngineConfig(
            model="toy",
            speculation=SpeculationConfig(
                num_draft_tokens=num_draft_tokens, verification=verification, fallback_strategy=fallback_strategy
            ),
            batching=BatchingConfig(max_size=max_batch_size, max_batch_tokens=max_batch_tokens),
            cache=CacheConfig(page_size=page_size, prefix_caching=prefix_caching),
        ),
        generation_defaults=GenerationDefaults(eos_token_ids=frozenset(eos_token_ids)),
        proposer=proposer,
        planner=planner,
        fault_limits=fault_limits,
    )


class Transcript:
    """All outputs of one request, put together."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.token_origins: list[TokenOrigin] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, f"output after the end: {output}"
        self.token_ids += output.token_ids
        self.token_origins += output.token_origins
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "told twice"
            self.prompt_logprobs = output.prompt_logprobs
        self.text += output.text
        self.finish_reason, self.stop_reason, self.last = output.finish_reason, output.stop_reason, output
        assert output.num_output_tokens == len(self.token_ids) == len(self.token_origins)


def run_requests(engine: Engine, requests: Sequence[Request], *, max_steps: int = 10_000) -> dict[str, Transcript]:
    """Serve `requests` to the end, checking the engine's invariants after every step."""
    transcripts = {request.request_id: Transcript() for request in requests}
    for request in requests:
        engine.add_request(request)
    drain(engine, transcripts, max_steps=max_steps)
    return transcripts


def drain(engine: Engine, transcripts: dict[str, Transcript], *, max_steps: int = 10_000) -> None:
    for _ in range(max_steps):
        if not engine.has_unfinished():
            break
        step_once(engine, transcripts)
    assert not engine.has_unfinished(), f"not done after {max_steps} steps"
    assert engine.allocator.num_used == 0, "pages leak"


def step_once(engine: Engine, transcripts: dict[str, Transcript]) -> None:
    for output in engine.step():
        transcripts[output.request_id].add(output)
    engine.check_integrity()


def make_requests(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams], prefix: str = "r"
) -> list[Request]:
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    return [
        Request(request_id=f"{prefix}{i}", prompt_token_ids=list(prompt), sampling=p)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]


def random_prompts(
    num_prompts: int, vocab_size: int, *, low: int = 1, high: int = 40, seed: int = 0
) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, generator.integers(low, high + 1)).tolist() for _ in range(num_prompts)]
