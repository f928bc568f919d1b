"""A toy drafter that says c_1 of each draft beforehand, and remembers for whom its pass ran and what it drew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dspark.speculation.proposal import NO_DRAFT, Draft, DraftContext, DraftRound, Forecast, Proposer


class StatedProposer(Proposer):
    """Drafts what `inner` drafts and states `confidence(context)` as c_1; it forecasts one token of that survival."""

    name = "stated"
    has_confidences = True
    has_pass = True

    def __init__(self, inner: Proposer, confidence: Callable[[DraftContext], float]) -> None:
        self.inner = inner
        self.confidence = confidence
        self.begun: list[list[str]] = []  # request ids of each round
        self.drafted: list[list[str]] = []
        self.verdicts: list[tuple[str, int, int]] = []  # request id, verified, accepted

    def forecast(self, contexts: Sequence[DraftContext]) -> list[Forecast]:
        return [Forecast(paid=[self.confidence(context)]) for context in contexts]

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        joining = [i for i, context in enumerate(contexts) if context.joins_pass]
        if not joining:
            return [NO_DRAFT] * len(contexts)
        drafts = dict(zip(joining, self.begin([contexts[i] for i in joining]).draft(range(len(joining))), strict=True))
        return [drafts.get(i, NO_DRAFT) for i in range(len(contexts))]

    def begin(self, contexts: Sequence[DraftContext]) -> DraftRound:
        assert all(context.joins_pass for context in contexts), "the pass was begun for one that does not join"
        self.begun.append([context.request_id for context in contexts])
        return _Round(self, contexts)

    def take_verdict(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        self.verdicts.append((request_id, len(draft.token_ids), num_accepted))

    def release(self, request_id: str) -> None:
        self.inner.release(request_id)


class _Round(DraftRound):
    def __init__(self, proposer: StatedProposer, contexts: Sequence[DraftContext]) -> None:
        self._proposer = proposer
        self._contexts = contexts

    def first_confidences(self) -> list[float]:
        return [self._proposer.confidence(context) for context in self._contexts]

    def draft(self, chosen: Sequence[int]) -> list[Draft]:
        contexts = [self._contexts[i] for i in chosen]
        self._proposer.drafted.append([context.request_id for context in contexts])
        return self._proposer.inner.propose(contexts)
