"""A toy drafter that says c_1 of each draft beforehand, and remembers for whom its rounds began and what they drew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dspark.speculation.proposal import Draft, DraftContext, DraftRound, Proposer


class StatedProposer(Proposer):
    """Drafts what `inner` drafts and states `confidence(context)` as c_1."""

    name = "stated"
    has_confidences = True

    def __init__(self, inner: Proposer, confidence: Callable[[DraftContext], float]) -> None:
        self.inner = inner
        self.confidence = confidence
        self.begun: list[list[str]] = []  # request ids of each round
        self.drafted: list[list[str]] = []
        self.verdicts: list[tuple[str, int, int]] = []  # request id, verified, accepted

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return self.begin(contexts).draft(range(len(contexts)))

    def begin(self, contexts: Sequence[DraftContext]) -> DraftRound:
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
