"""A drafter and the n-gram proposer together: each request gets, in each round, the draft that promises more.

The promise is the number of tokens to expect accepted. It is known before any token of the round is drawn: a choice
that looked at drawn tokens would bias what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dspark.speculation.acceptance_rates import DRAFTER_PRIOR, AcceptanceRates, Rates, restore_parts
from dspark.speculation.ngram import NgramProposer
from dspark.speculation.prefix_scheduler import survivals_of
from dspark.speculation.proposal import NO_DRAFT, CommittedFeatures, Draft, DraftContext, Forecast, Proposer

# A drafter with a confidence head is believed until its drafts say otherwise.
CONFIDENT_PRIOR = Rates(first=1.0, later=0.5)


class CombinedProposer(Proposer):
    """Gives each request either the drafter's or the n-gram proposer's draft.

    The n-gram proposer states its own promise (`NgramProposer`). The drafter's comes from running acceptance rates of
    its drafts that were verified (`acceptance_rates`). A drafter with a confidence head adds what it thinks of this
    round: c_1, which looks at the anchor alone. It runs only for requests that join its pass and where it may promise
    more, and its sequential head only for those where it does; the others get what n-gram found, or nothing.

    The confidences of a draft are those that its proposer stated, unchanged: the drafter's are those of its head,
    calibrated or not, and the rates by which the two are compared here do not enter them.
    """

    def __init__(self, drafter: Proposer) -> None:
        self.name = f"{drafter.name}+ngram"
        self.max_draft_tokens = drafter.max_draft_tokens
        self.tapped_layers = drafter.tapped_layers
        self.has_confidences = drafter.has_confidences
        self.has_pass = drafter.has_pass
        self._drafter = drafter
        self._ngram = NgramProposer()
        self._drafter_rates = AcceptanceRates(CONFIDENT_PRIOR if drafter.has_confidences else DRAFTER_PRIOR)
        self._stated: dict[str, float] = {}  # c_1 of the drafter's last draft for a request

    def take_features(self, committed: CommittedFeatures) -> None:
        """Hand them to the drafter, which needs those of all requests, whoever drafts for them."""
        self._drafter.take_features(committed)

    def forecast(self, contexts: Sequence[DraftContext]) -> list[Forecast]:
        """Return what n-gram promises for nothing and what the drafter's pass would."""
        free, paid = self._ngram.forecast(contexts), self._drafter.forecast(contexts)
        return [Forecast(free=f.free, paid=p.paid) for f, p in zip(free, paid, strict=True)]

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return one draft per context, in order, with the name of its proposer."""
        repeated = self._ngram.propose(contexts)
        chosen = self._choose_drafter(contexts, repeated)
        drafts = [chosen.get(i, NO_DRAFT) for i in range(len(contexts))]
        for i, (draft, repetition) in enumerate(zip(drafts, repeated, strict=True)):
            if draft.token_ids:
                drafts[i] = replace(draft, proposer_name=self._drafter.name)
            elif repetition.token_ids:  # also where the drafter drew nothing at all
                drafts[i] = replace(repetition, proposer_name=self._ngram.name)
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
        self._stated.pop(request_id, None)

    def calibration_errors(self) -> Sequence[float | None]:
        """Those of the drafter."""
        return self._drafter.calibration_errors()

    def reset_calibration(self) -> None:
        """See `Proposer`."""
        self._drafter.reset_calibration()

    def export_state(self) -> dict[str, Any]:
        """See `Proposer`."""
        return {
            "drafter": self._drafter.export_state(),
            "ngram": self._ngram.export_state(),
            "choice": self._drafter_rates.export(),
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """See `Proposer`."""
        restorers = {
            "drafter": self._drafter.restore_state,
            "ngram": self._ngram.restore_state,
            "choice": self._drafter_rates.restore,
        }
        restore_parts(self.name, state, restorers)

    @property
    def num_requests(self) -> int:
        """Requests that anything is held of."""
        return max(self._ngram.num_requests, len(self._stated), self._drafter_rates.num_requests)

    # -- the choice ----------------------------------------------------------------------------------------------

    def _choose_drafter(self, contexts: Sequence[DraftContext], repeated: Sequence[Draft]) -> dict[int, Draft]:
        """Return the drafter's drafts of the contexts where it promises more than the repetition found there."""
        self.num_in_pass = 0
        bounds = [sum(survivals_of(draft.confidences or ())) for draft in repeated]
        # c_1 is 1 at most: where even that would not do (periodic text), the drafter's pass is saved.
        candidates = [i for i, c in enumerate(contexts) if c.joins_pass and self._drafter_promise(c, 1.0) > bounds[i]]
        if not candidates:
            return {}
        self.num_in_pass = len(candidates)
        drafting = self._drafter.begin([contexts[i] for i in candidates])
        stated = drafting.first_confidences() if self.has_confidences else [1.0] * len(candidates)
        chosen = [
            j
            for j, i in enumerate(candidates)
            if not repeated[i].token_ids or self._drafter_promise(contexts[i], stated[j]) > bounds[i]
        ]
        if not chosen:
            return {}
        for j in chosen:
            self._stated[contexts[candidates[j]].request_id] = stated[j]
        return {candidates[j]: draft for j, draft in zip(chosen, drafting.draft(chosen), strict=True)}

    def _drafter_promise(self, context: DraftContext, stated_first: float) -> float:
        rates = self._drafter_rates.rates(context.request_id)
        first = min(1.0, rates.first * stated_first)
        return Rates(first, rates.later).expected_accepted(context.num_draft_tokens)
