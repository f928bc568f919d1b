"""Drafts cut to their structure, and the exact law of what comes out: summed over all drafts, coins and draws."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from enumerated_draws import completed, joint, outcomes
from structure_cases import compiler_of

from dspark.request import SamplingParams
from dspark.speculation.logit_processing import LogitProcessor
from dspark.speculation.proposal import Draft, DraftContext
from dspark.speculation.sampling import target_probs
from dspark.speculation.structured_drafts import within_structure
from dspark.speculation.verification import VerificationResult, VerificationRow, verify_batch
from dspark.structure import Structure

WORDS = ["a", "b", "1", "<end>"]
VOCAB = len(WORDS)
A, B, ONE, END = range(VOCAB)
PROMPT = [A, B]
COMPILER = compiler_of(WORDS)
TARGET = np.random.default_rng(5).standard_normal((5, VOCAB)) * 1.5
DRAFT = np.random.default_rng(6).dirichlet(np.ones(VOCAB), size=5)
# What is asked, and the texts that may come out as Python writes them.
REQUESTS = {
    "open": (SamplingParams(structure=Structure.regex("[ab]+1?")), "[ab]+1?"),
    "two texts": (SamplingParams(structure=Structure.choice(["ab", "b1a"])), "ab|b1a"),
    "awaited": (SamplingParams(structure=Structure.regex("b1?", after="ba")), "(?:(?!ba).)*bab1?"),
    "without the end": (SamplingParams(structure=Structure.regex("[ab]*1?"), ignore_eos=True), "[ab]*1?"),
    "filtered": (SamplingParams(structure=Structure.regex("[ab1]{2}"), top_p=0.8, temperature=0.7), "[ab1]{2}"),
    "dead ends": (SamplingParams(structure=Structure.regex("ab|b1|1a"), bad_token_ids=[B]), "ab|b1|1a"),
    "penalty": (SamplingParams(structure=Structure.regex("[ab1]{3}"), presence_penalty=0.7), "[ab1]{3}"),
}
requests = pytest.mark.parametrize(("sampling", "pattern"), REQUESTS.values(), ids=REQUESTS.keys())


# -- the reference, without any of the code that is tested -----------------------------------------------------------


@lru_cache
def allowed_by_hand(pattern: str, prefix: tuple[int, ...]) -> frozenset[int]:
    """Return what may follow by trying all continuations; the end where the text is one that may come out."""
    text = "".join(WORDS[i] for i in prefix)
    if END in prefix:
        return frozenset()
    allowed = {END} if re.fullmatch(pattern, text) else set()
    for length in range(1, 5):
        for word in itertools.product(range(END), repeat=length):
            if re.fullmatch(pattern, text + "".join(WORDS[i] for i in word)):
                allowed.add(word[0])
    return frozenset(allowed)


def probs_by_hand(sampling: SamplingParams, pattern: str, prefix: tuple[int, ...]) -> np.ndarray:
    """Return the law of the next token; behind a text that cannot go on, token 0 for ever."""
    allowed = allowed_by_hand(pattern, prefix) - set(sampling.bad_token_ids)
    if sampling.ignore_eos:
        allowed -= {END}
    if allowed <= {END} and END in (allowed | allowed_by_hand(pattern, prefix)):
        allowed = frozenset()
    if not allowed:
        return np.eye(VOCAB)[0]
    logits = np.full(VOCAB, -np.inf)
    for token_id in allowed:
        logits[token_id] = TARGET[prefix[-1] if prefix else 4][token_id] - sampling.presence_penalty * (
            token_id in prefix
        )
    return target_probs(torch.tensor(logits, dtype=torch.float32)[None], [sampling])[0][0].double().numpy()


# -- the law -----------------------------------------------------------------------------------------------------------


def draft_rows(kind: str, processor: LogitProcessor, prefix: tuple[int, ...]) -> np.ndarray:
    """Return the law that a proposer draws its next token from: knowing the structure, not, or its likeliest token."""
    row = DRAFT[prefix[-1] if prefix else 4]
    if kind == "likeliest":
        return np.eye(VOCAB)[row.argmax()]
    allowed = processor.structure.allowed(prefix) if kind == "masked" else None
    masked = row if allowed is None else row * allowed
    return masked / masked.sum() if masked.sum() else row


def emitted_law(
    sampling: SamplingParams, method: str, kind: str, plan: Callable[[Draft], int]
) -> dict[tuple[int, ...], float]:
    """Return the probability of all that one round of three drafted tokens can emit, drafts cut as the engine does.

    `plan` chooses how much of a draft is verified.
    """
    length = 3
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    processor = LogitProcessor(sampling, prompt_token_ids=PROMPT, structure=COMPILER.matcher_for(sampling))
    for drafted in itertools.product(range(VOCAB), repeat=length):
        q = [draft_rows(kind, processor, drafted[:i]) for i in range(length)]
        draft_probability = float(np.prod([row[x] for row, x in zip(q, drafted, strict=True)]))
        if draft_probability == 0.0:
            continue
        vectors = None if kind == "likeliest" else torch.tensor(np.stack(q), dtype=torch.float32)
        context = DraftContext(
            request_id="r", token_ids=PROMPT, sampling=sampling, seed=0, is_coupled=False, num_draft_tokens=length,
            page_ids=(), page_serials=(), logit_processor=processor,
        )  # fmt: skip
        draft = within_structure(Draft(token_ids=list(drafted), probs=vectors), context)
        draft = draft.prefix(plan(draft))
        path = tuple(draft.token_ids)
        logits = np.stack([TARGET[path[i - 1] if i else 4] for i in range(len(path) + 1)])
        row = VerificationRow(
            draft=draft, sampling=sampling, seed=0, method=method, anchor_position=1, logit_processor=processor
        )

        verdicts: list[tuple[VerificationResult, int]] = []

        def verify(draws, logits=logits, row=row, verdicts=verdicts):  # type: ignore[no-untyped-def]
            result = verify_batch(torch.tensor(logits, dtype=torch.float32), [row], draws=draws)[0]
            verdicts.append((result, draws.picks[-1].position - len(PROMPT)))
            return result

        for probability, num_accepted, last in outcomes(verify):
            result, num_before_pick = verdicts[-1]
            if num_before_pick > num_accepted:  # the pick was of a row that leaves nothing, and was taken back
                emitted[tuple(result.token_ids)] += draft_probability * probability
                continue
            for token_id in np.flatnonzero(last):
                tokens = (*path[:num_accepted], int(token_id))
                kept = tokens[: processor.structure.num_allowed(tokens)]
                emitted[kept] += draft_probability * probability * last[token_id]
    return emitted


# A planner may look at a draft's length, for example in what it hopes of tokens that it has not seen.
PLANS = {"all": lambda draft: len(draft.token_ids), "half": lambda draft: (len(draft.token_ids) + 1) // 2}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("kind", ["masked", "unmasked", "likeliest"])
@pytest.mark.parametrize("method", ["rejection", "block"])
@requests
def test_what_comes_out_has_the_law_of_the_masked_target(sampling, pattern, method, kind, plan):
    """G1: with a proposer that knows the structure, one that does not, and a deterministic one."""
    emitted = emitted_law(sampling, method, kind, plan)

    def probs(prefix: tuple[int, ...]) -> np.ndarray:
        return probs_by_hand(sampling, pattern, prefix)

    law = completed(dict(emitted), probs, length=4)
    assert np.abs(law - joint(probs, (), length=4)).max() < 1e-6


# -- what is cut -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafted", "cut", "judged"),
    [
        ([A, B, ONE], 3, 3),  # within the structure, to its end
        ([A, B], 2, 2),
        ([A, ONE, A], 1, 2),  # forbidden in the middle
        ([END, A, B], 0, 1),  # forbidden at once
        ([B, ONE, A, B], 2, 2),  # complete in the middle
        ([A, B, END, A], 3, 3),  # ended in the middle
    ],
)
def test_drafts_are_cut_behind_what_can_come_out(drafted, cut, judged):
    """A draft whose tokens are judged by their probabilities keeps its length for the planner."""
    sampling = SamplingParams(structure=Structure.regex("(ab|b)1?"))
    vectors = torch.full((len(drafted), VOCAB), 0.25)
    draft = Draft(token_ids=drafted, probs=vectors, confidences=[0.5] * len(drafted))

    def cut_for(draft: Draft, *, is_coupled: bool = False, temperature: float = 1.0) -> Draft:
        changed = replace(sampling, temperature=temperature)
        processor = LogitProcessor(changed, prompt_token_ids=PROMPT, structure=COMPILER.matcher_for(changed))
        context = DraftContext(
            request_id="r", token_ids=PROMPT, sampling=changed, seed=0, is_coupled=is_coupled, num_draft_tokens=4,
            page_ids=(), page_serials=(), logit_processor=processor,
        )  # fmt: skip
        return within_structure(draft, context)

    assert cut_for(replace(draft, probs=None)).token_ids == drafted[:cut]
    assert cut_for(draft, is_coupled=True).token_ids == drafted[:cut]
    assert cut_for(draft, temperature=0.0).token_ids == drafted[:cut]
    planned = cut_for(draft)
    assert (planned.token_ids, planned.confidences) == (drafted, [0.5] * len(drafted))
    verified = planned.prefix(4)
    assert verified.token_ids == drafted[:judged]
    assert verified.probs.shape == (judged, VOCAB)
    assert planned.prefix(1).token_ids == drafted[:1]
