"""A drafter and the n-gram proposer together: each request gets, in each round, the draft that promises more.

The promise is the number of tokens to expect accepted. It is known before any token of the round is drawn: a choice
that looked at drawn tokens would bias what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dspark.speculation.acceptance_rates import AcceptanceRates, Rates
from dspark.speculation.ngram import NgramMatch, NgramProposer
from dspark.speculation.proposal import NO_DRAFT, CommittedFeatures, Draft, DraftContext, Proposer


class MatchKind(NamedTuple):
    """Repetitions that go on about equally often."""

    num_matched: int  # at least; one of 2, 3, 4, 8, 16
    evidence: str  # "periodic", "contested" (by a later occurrence of a shorter suffix), else "plain"


# What to expect of a kind before anything was seen: of 126,000 answer tokens of a 135M chat model, drafts after each.
MATCH_PRIORS = {
    MatchKind(2, "plain"): Rates(0.46, 0.62),
    MatchKind(3, "contested"): Rates(0.31, 0.68),
    MatchKind(3, "plain"): Rates(0.57, 0.70),
    MatchKind(4, "contested"): Rates(0.46, 0.77),
    MatchKind(4, "plain"): Rates(0.72, 0.79),
    MatchKind(4, "periodic"): Rates(0.72, 0.84),
    MatchKind(8, "contested"): Rates(0.74, 0.87),
    MatchKind(8, "plain"): Rates(0.85, 0.88),
    MatchKind(8, "periodic"): Rates(0.89, 0.93),
    MatchKind(16, "contested"): Rates(0.92, 0.93),
    MatchKind(16, "plain"): Rates(0.95, 0.95),
    MatchKind(16, "periodic"): Rates(0.995, 0.997),
}
_LEAST_MATCHED = tuple(sorted({kind.num_matched for kind in MATCH_PRIORS}, reverse=True))
# A drafter with a confidence head is believed until its drafts say otherwise.
CONFIDENT_PRIOR = Rates(first=1.0, later=0.5)
DRAFTER_PRIOR = Rates(first=0.5, later=0.5)


def match_kind(match: NgramMatch) -> MatchKind:
    """Return the kind of a repetition."""
    evidence = "periodic" if match.is_periodic else "contested" if match.is_contested else "plain"
    return MatchKind(next(least for least in _LEAST_MATCHED if least <= match.num_matched), evidence)


@dataclass(frozen=True, kw_only=True)
class _Foretold:
    """What the n-gram proposer said would follow a text; the text itself tells later how far that was right."""

    num_tokens: int  # of the text
    token_ids: list[int]
    kind: MatchKind


class CombinedProposer(Proposer):
    """Gives each request either the drafter's or the n-gram proposer's draft.

    Both promises come from running acceptance rates (`acceptance_rates`). The n-gram proposer's are learned per kind of
    match from every text it could have continued, chosen or not; the drafter's from its drafts that were verified. A
    drafter with a confidence head adds what it thinks of this round: c_1, which looks at the anchor alone. It runs only
    for requests where it may promise more, and its sequential head only for those where it does.
    """

    def __init__(self, drafter: Proposer) -> None:
        self.name = f"{drafter.name}+ngram"
        self.max_draft_tokens = drafter.max_draft_tokens
        self.tapped_layers = drafter.tapped_layers
        self.has_confidences = drafter.has_confidences
        self._drafter = drafter
        self._ngram = NgramProposer()
        self._drafter_rates = AcceptanceRates(CONFIDENT_PRIOR if drafter.has_confidences else DRAFTER_PRIOR)
        self._match_rates = {kind: AcceptanceRates(prior) for kind, prior in MATCH_PRIORS.items()}
        self._foretold: dict[str, _Foretold] = {}
        self._stated: dict[str, float] = {}  # c_1 of the drafter's last draft for a request

    def take_features(self, committed: CommittedFeatures) -> None:
        """Hand them to the drafter, which needs those of all requests, whoever drafts for them."""
        self._drafter.take_features(committed)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return one draft per context, in order, with the name of its proposer."""
        matches = [self._find_match(context) for context in contexts]
        chosen = self._choose_drafter(contexts, matches)
        drafts = [chosen.get(i, NO_DRAFT) for i in range(len(contexts))]
        for i, (draft, match) in enumerate(zip(drafts, matches, strict=True)):
            if draft.token_ids:
                drafts[i] = replace(draft, proposer_name=self._drafter.name)
            elif match is not None:  # also where the drafter drew nothing at all
                drafts[i] = replace(match.draft, proposer_name=self._ngram.name)
        return drafts

    def take_verdict(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Learn from a verified draft of the drafter; n-gram drafts are judged by the text that follows."""
        if draft.proposer_name != self._drafter.name:
            return
        self._drafter.take_verdict(request_id, draft, num_accepted)
        self._drafter_rates.observe(
            request_id,
            num_judged=min(num_accepted + 1, len(draft.token_ids)),
            num_accepted=num_accepted,
            stated_first=self._stated.get(request_id, 1.0),
        )

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are harmless. What it taught about all requests stays."""
        self._drafter.release(request_id)
        self._ngram.release(request_id)
        self._drafter_rates.release(request_id)
        for rates in self._match_rates.values():
            rates.release(request_id)
        self._foretold.pop(request_id, None)
        self._stated.pop(request_id, None)

    @property
    def num_requests(self) -> int:
        """Requests that anything is held of."""
        rates = (self._drafter_rates, *self._match_rates.values())
        return max(self._ngram.num_requests, len(self._foretold), len(self._stated), *(r.num_requests for r in rates))

    # -- the n-gram proposer's side ------------------------------------------------------------------------------

    def _find_match(self, context: DraftContext) -> NgramMatch | None:
        """Judge what was foretold for the request, and look for a repetition in its text as it is now."""
        foretold = self._foretold.pop(context.request_id, None)
        if foretold is not None:
            self._judge(context, foretold)
        match = self._ngram.find_match(context)
        if match is not None:
            self._foretold[context.request_id] = _Foretold(
                num_tokens=len(context.token_ids), token_ids=match.draft.token_ids, kind=match_kind(match)
            )
        return match

    def _judge(self, context: DraftContext, foretold: _Foretold) -> None:
        """Compare what was foretold with the tokens that were committed since; those not yet committed don't count."""
        start = foretold.num_tokens
        num_judged = num_accepted = 0
        for token_id, expected in zip(
            context.token_ids[start : start + len(foretold.token_ids)], foretold.token_ids, strict=False
        ):
            num_judged += 1
            if token_id != expected:
                break
            num_accepted += 1
        if num_judged:
            rates = self._match_rates[foretold.kind]
            rates.observe(context.request_id, num_judged=num_judged, num_accepted=num_accepted)

    # -- the choice ----------------------------------------------------------------------------------------------

    def _choose_drafter(
        self, contexts: Sequence[DraftContext], matches: Sequence[NgramMatch | None]
    ) -> dict[int, Draft]:
        """Return the drafter's drafts of the contexts where it promises more than the repetition found there."""
        bounds = [self._ngram_promise(c, match) for c, match in zip(contexts, matches, strict=True)]
        # c_1 is 1 at most: where even that would not do (periodic text), the drafter's pass is saved.
        candidates = [i for i, c in enumerate(contexts) if self._drafter_promise(c, 1.0) > bounds[i]]
        if not candidates:
            return {}
        drafting = self._drafter.begin([contexts[i] for i in candidates])
        stated = drafting.first_confidences() if self.has_confidences else [1.0] * len(candidates)
        chosen = [
            j
            for j, i in enumerate(candidates)
            if matches[i] is None or self._drafter_promise(contexts[i], stated[j]) > bounds[i]
        ]
        if not chosen:
            return {}
        for j in chosen:
            self._stated[contexts[candidates[j]].request_id] = stated[j]
        return {candidates[j]: draft for j, draft in zip(chosen, drafting.draft(chosen), strict=True)}

    def _ngram_promise(self, context: DraftContext, match: NgramMatch | None) -> float:
        if match is None:
            return 0.0
        return (
            self._match_rates[match_kind(match)].rates(context.request_id).expected_accepted(context.num_draft_tokens)
        )

    def _drafter_promise(self, context: DraftContext, stated_first: float) -> float:
        rates = self._drafter_rates.rates(context.request_id)
        first = min(1.0, rates.first * stated_first)
        return Rates(first, rates.later).expected_accepted(context.num_draft_tokens)
