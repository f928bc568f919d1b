"""The exact law of two rounds of a drafter and n-gram together, where forecasts decide who joins the drafting pass.

Every draft, coin and drawn token of two requests is enumerated. What the first round drew, stated and accepted moves
all rates, and so who joins, who drafts and how far it is verified in the second.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from enumerated_draws import completed, joint, outcomes

from dspark.request import SamplingParams
from dspark.speculation.acceptance_rates import DRAFTER_PRIOR
from dspark.speculation.combined import CombinedProposer
from dspark.speculation.position_rates import PositionRates
from dspark.speculation.prefix_scheduler import survivals_of
from dspark.speculation.proposal import Draft, DraftContext, DraftRound, Forecast, Proposer
from dspark.speculation.verification import VerificationRow, verify_batch

DRAFT_LEN = 2
NUM_TOKENS = 2 * (DRAFT_LEN + 1)  # at most, of two rounds
TARGET = np.array([[0.7, 0.3], [0.2, 0.8]])  # by the last token
DRAFTER = np.array([[0.5, 0.5], [0.9, 0.1]])
CONFIDENCES = np.minimum(TARGET, DRAFTER).sum(axis=1)  # 0.8 after a 0, 0.3 after a 1
LEAST_PAID = 0.67  # accepted tokens to expect of a draft that is worth its pass
LEAST_SURVIVAL = 0.25  # of a token that is worth verifying

PERIODIC = [0, 1, 0, 1, 0, 1, 0, 1]
PAIR = [1, 1, 0, 0, 0, 1, 1]  # n-gram finds two tokens again
NEW = [0, 0, 1]  # nothing repeats
REQUESTS = {"periodic, new": (PERIODIC, NEW), "pair, new": (PAIR, NEW), "pair, pair": (PAIR, [0, 0, 1, 1, 0, 0])}


class ScriptedDrafter(Proposer):
    """Draws what a script says and states the exact chances of it; forecasts from what it stated and was told."""

    name = "scripted"
    has_confidences = True
    has_pass = True

    def __init__(self) -> None:
        self.rates = PositionRates(DRAFTER_PRIOR)
        self.script: dict[str, tuple[int, ...]] = {}

    def forecast(self, contexts: Sequence[DraftContext]) -> list[Forecast]:
        for context in contexts:
            self.rates.settle(context.request_id, len(context.token_ids))
        rates = [self.rates.confidences(context.request_id, context.num_draft_tokens) for context in contexts]
        return [Forecast(paid=survivals_of(confidences)) for confidences in rates]

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return self.begin(contexts).draft(range(len(contexts)))

    def begin(self, contexts: Sequence[DraftContext]) -> DraftRound:
        assert all(context.joins_pass for context in contexts)
        return _Round(self, contexts)

    def take_verdict(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        self.rates.observe(request_id, num_verified=len(draft.token_ids), num_accepted=num_accepted)

    def release(self, request_id: str) -> None:
        self.rates.release(request_id)


class _Round(DraftRound):
    def __init__(self, drafter: ScriptedDrafter, contexts: Sequence[DraftContext]) -> None:
        self._drafter = drafter
        self._contexts = contexts

    def first_confidences(self) -> list[float]:
        stated = [float(CONFIDENCES[context.token_ids[-1]]) for context in self._contexts]
        for context, confidence in zip(self._contexts, stated, strict=True):
            self._note(context, [confidence])
        return stated

    def draft(self, chosen: Sequence[int]) -> list[Draft]:
        drafts = []
        for context in (self._contexts[i] for i in chosen):
            token_ids = self._drafter.script[context.request_id]
            before = [context.token_ids[-1], *token_ids[:-1]]
            confidences = [float(CONFIDENCES[t]) for t in before]
            probs = torch.tensor(DRAFTER[before], dtype=torch.float32)
            self._note(context, confidences)
            drafts.append(Draft(token_ids=list(token_ids), probs=probs, confidences=confidences))
        return drafts

    def _note(self, context: DraftContext, confidences: list[float]) -> None:
        self._drafter.rates.note_stated(context.request_id, num_tokens=len(context.token_ids), confidences=confidences)


# -- one round -----------------------------------------------------------------------------------------------------


def context_of(request_id: str, text: list[int], *, joins: bool = True) -> DraftContext:
    return DraftContext(
        request_id=request_id, token_ids=text, sampling=SamplingParams(), seed=0, is_coupled=False,
        num_draft_tokens=DRAFT_LEN, page_ids=(), page_serials=(), joins_pass=joins,
    )  # fmt: skip


def contexts_to_draft(proposer: CombinedProposer, texts: dict[str, list[int]]) -> list[DraftContext]:
    """Let those join whose forecast is worth a pass."""
    forecasts = proposer.forecast([context_of(i, text) for i, text in texts.items()])
    joins = [sum(f.paid) > max(sum(f.free), LEAST_PAID) for f in forecasts]
    return [context_of(i, text, joins=j) for (i, text), j in zip(texts.items(), joins, strict=True)]


def drafted_rounds(
    proposer: CombinedProposer, texts: dict[str, list[int]], *, is_dropped_once: bool = False, peeks: bool = False
) -> Iterator[tuple[float, CombinedProposer, list[Draft]]]:
    """Yield (probability, proposer after it, verified parts of the drafts) for all that the drafter can draw.

    `is_dropped_once`: the drafts are dropped before they are verified, and all is done again with the same noise.
    `peeks`: what may not be: a draft of the drafter is verified only if it begins with a 0.
    """
    for tokens in itertools.product(range(2), repeat=DRAFT_LEN * len(texts)):
        drafting = copy.deepcopy(proposer)
        script = {i: tokens[DRAFT_LEN * r : DRAFT_LEN * (r + 1)] for r, i in enumerate(texts)}
        drafting._drafter.script = script
        contexts = contexts_to_draft(drafting, texts)
        drafts = drafting.propose(contexts)
        if is_dropped_once:
            drafts = drafting.propose(contexts_to_draft(drafting, texts))
        parts = []
        for draft in drafts:
            survivals = survivals_of(draft.confidences or ())
            length = sum(a >= LEAST_SURVIVAL for a in survivals)
            if peeks and draft.probs is not None and draft.token_ids[0] == 1:
                length = 0
            parts.append(draft.prefix(length))
        # The script of a request for which nothing is drawn is drawn all the same, by a drafter nobody asks.
        before = [[texts[i][-1], *x[:-1]] for i, x in script.items()]
        chances = [DRAFTER[b, list(x)].prod() for b, x in zip(before, script.values(), strict=True)]
        yield float(np.prod(chances)), drafting, parts


def verification_of(draft: Draft, last: int, method: str):  # type: ignore[no-untyped-def]
    """Return every (probability, accepted, distribution of the last token) of verifying a draft after `last`."""
    rows = np.log(TARGET[[last, *draft.token_ids]])
    row = VerificationRow(draft=draft, sampling=SamplingParams(), seed=0, method=method, anchor_position=0)
    return outcomes(lambda draws: verify_batch(torch.tensor(rows, dtype=torch.float32), [row], draws=draws)[0])


@cache
def emissions(tokens: tuple[int, ...], is_certain: bool, last: int, method: str) -> tuple[tuple[float, int, int], ...]:
    """Return (probability, accepted, last token) of verifying drafted tokens after `last`."""
    probs = None
    if tokens and not is_certain:
        probs = torch.tensor(DRAFTER[[last, *tokens[:-1]]], dtype=torch.float32)
    draft = Draft(token_ids=list(tokens), probs=probs)
    return tuple(
        (chance * float(p), num_accepted, token_id)
        for chance, num_accepted, law in verification_of(draft, last, method)
        for token_id, p in enumerate(law)
        if p > 0.0
    )


def emissions_of(draft: Draft, last: int, method: str) -> tuple[tuple[float, int, int], ...]:
    return emissions(tuple(draft.token_ids), draft.probs is None, last, method)


@cache
def law_of(tokens: tuple[int, ...], is_certain: bool, last: int, method: str, length: int) -> np.ndarray:
    """Return the law of `length` tokens after `last`, the first of them from a verification."""
    emitted: dict[tuple[int, ...], float] = {}
    for chance, num_accepted, token_id in emissions(tokens, is_certain, last, method):
        prefix = (*tokens[:num_accepted], token_id)
        emitted[prefix] = emitted.get(prefix, 0.0) + chance
    return completed(emitted, lambda prefix: TARGET[prefix[-1] if prefix else last], length=length).ravel()


# -- two rounds ----------------------------------------------------------------------------------------------------


def output_law(texts: Sequence[list[int]], method: str, **faults: bool) -> tuple[np.ndarray, set]:
    """Return the joint law of NUM_TOKENS tokens of two requests, and who drafted how much in the second round."""
    start = dict(zip("ab", texts, strict=True))
    law = np.zeros([2] * (2 * NUM_TOKENS))
    seen = set()
    for first_chance, proposer, parts in drafted_rounds(CombinedProposer(ScriptedDrafter()), start, **faults):
        ways = [emissions_of(part, text[-1], method) for part, text in zip(parts, start.values(), strict=True)]
        for (chance_a, *a), (chance_b, *b) in itertools.product(*ways):
            after, texts_now, emitted = copy.deepcopy(proposer), {}, []
            for (i, text), part, (num_accepted, token_id) in zip(start.items(), parts, (a, b), strict=True):
                emitted.append((*part.token_ids[:num_accepted], token_id))
                texts_now[i] = [*text, *emitted[-1]]
                if part.token_ids:
                    after.take_verdict(i, part, num_accepted)
            for chance, _, drafts in drafted_rounds(after, texts_now):
                seen.add(tuple((draft.proposer_name, len(draft.token_ids)) for draft in drafts))
                last_laws = [
                    law_of(tuple(d.token_ids), d.probs is None, text[-1], method, NUM_TOKENS - len(e))
                    for d, text, e in zip(drafts, texts_now.values(), emitted, strict=True)
                ]
                share = first_chance * chance_a * chance_b * chance * np.multiply.outer(*last_laws)
                block = (*emitted[0], *[slice(None)] * (NUM_TOKENS - len(emitted[0])), *emitted[1])
                law[block] += share.reshape(law[block].shape)
    return law, seen


def deviation(texts: Sequence[list[int]], method: str, **faults: bool) -> tuple[float, set]:
    law, seen = output_law(texts, method, **faults)
    laws = [
        joint(lambda prefix, last=text[-1]: TARGET[prefix[-1] if prefix else last], (), length=NUM_TOKENS)
        for text in texts
    ]
    return float(np.abs(law - np.multiply.outer(*laws)).max()), seen


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("name", REQUESTS)
def test_two_rounds_have_the_targets_law_whoever_joins(name, method):
    difference, seen = deviation(REQUESTS[name], method)
    assert difference < 1e-6
    assert {name for kinds in seen for name, _ in kinds} >= {"scripted", "ngram"}
    assert len(seen) >= 3, "rates and drawn tokens did decide"


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_drafts_that_were_dropped_and_made_again_keep_the_law(method):
    """Nothing that was stated of the dropped draft decides whether the same tokens are drafted again."""
    assert deviation(REQUESTS["pair, new"], method, is_dropped_once=True)[0] < 1e-6


def test_it_would_be_noticed_if_a_dropped_draft_counted(monkeypatch):
    settle = PositionRates.settle
    monkeypatch.setattr(PositionRates, "settle", lambda self, request_id, _: settle(self, request_id, 10**9))
    assert deviation(REQUESTS["pair, new"], "rejection", is_dropped_once=True)[0] > 1e-4


def test_it_would_be_noticed_if_a_drawn_token_decided():
    assert deviation(REQUESTS["pair, new"], "rejection", peeks=True)[0] > 1e-4
