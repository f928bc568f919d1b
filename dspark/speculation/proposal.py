"""What passes between the engine and a proposer: contexts of requests, drafts made for them, features of the target.

T committed positions of a step, m tapped layers, D hidden size of the target, P pages, R contexts of a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dspark.request import SamplingParams

if TYPE_CHECKING:  # the engine's policy (scheduler, sequence) runs without torch
    from torch import Tensor

    from dspark.speculation.logit_processing import LogitProcessor


@dataclass(frozen=True, kw_only=True)
class DraftContext:
    """What a proposer may know of one running request. The lists belong to the engine: read, never write."""

    request_id: str
    token_ids: Sequence[int]  # committed tokens; the last one is the anchor
    sampling: SamplingParams
    seed: int  # of the request's keyed noise
    is_coupled: bool  # draw proposals from the target's own noise (coupled verification)
    num_draft_tokens: int  # propose at most this many, at least 1
    page_ids: Sequence[int]  # covers len(token_ids) + num_draft_tokens positions
    page_serials: Sequence[int]  # [len(page_ids)] changes whenever the page gets a new owner and content
    # What changes the target's logits. A proposer may ignore it, or apply it to its own for more accepted tokens.
    logit_processor: LogitProcessor | None = None
    joins_pass: bool = True  # may take part in the costly pass of a proposer that has one (`Proposer.has_pass`)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Tokens proposed after the anchor of one request; empty `token_ids` means no proposal."""

    token_ids: list[int]
    probs: Tensor | None = None  # [k, V] float32, the very vectors that were sampled; None: deterministic (one-hot)
    # [k] probability that a token is accepted if all before it were (c_1 .. c_k); None: the proposer states none.
    # c_k may depend on the drawn tokens x_1 .. x_{k-1}, never on x_k.
    confidences: Sequence[float] | None = None
    proposer_name: str | None = None  # whose draft it is, where the engine's proposer chooses between several
    num_reachable: int | None = None  # what follows these cannot come out, whatever the target says; None: all can

    def prefix(self, length: int) -> Draft:
        """Return the first `length` proposals, without those that cannot come out."""
        if self.num_reachable is not None:
            length = min(length, self.num_reachable)
        return replace(
            self,
            num_reachable=None,
            token_ids=self.token_ids[:length],
            probs=None if self.probs is None else self.probs[:length],
            confidences=None if self.confidences is None else self.confidences[:length],
        )


NO_DRAFT = Draft(token_ids=[])


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What to expect of a request's next draft, known before anything of it is drawn.

    Survivals a_1 >= a_2 >= ..: the chances that the first k proposals are all accepted, at most `num_draft_tokens`.
    """

    free: Sequence[float] = ()  # of the draft that costs nothing (an n-gram match); empty: there is none
    paid: Sequence[float] = ()  # of the draft of a request that joins the pass; empty: no pass would draft for it


NO_FORECAST = Forecast()


@dataclass(frozen=True, kw_only=True)
class CommittedFeatures:
    """Hidden states of the target at the positions whose KV one step computed and whose tokens are committed."""

    features: Tensor  # [T, m * D], tapped layers side by side in the order asked for
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64 as in `ForwardBatch`
    new_page_ids: Tensor  # [P] int64 pages that the step began: what an earlier owner left there is to be cleared first


class DraftRound(Protocol):
    """A round that was begun: no token of it is drawn yet, so a choice made now does not bias what comes out."""

    def first_confidences(self) -> list[float]:
        """Return c_1 of each context [R], 0 where there will be no draft; asked only if `Proposer.has_confidences`."""
        ...

    def draft(self, chosen: Sequence[int]) -> list[Draft]:
        """Return a draft for each context in `chosen`, in order; called once at most, the others get none."""
        ...


class Proposer(Protocol):
    """Makes drafts for all running requests in one call. Any state of a request is keyed by its id.

    Implementations inherit from it, so that they only say what they want beyond plain drafting.
    """

    name: str
    max_draft_tokens: int | None = None  # a draft is at most this long; None: of any length
    tapped_layers: tuple[int, ...] = ()  # layers of the target whose outputs it wants (-1: the embedding's); none
    has_confidences: bool = False  # its rounds know c_1 of a draft before anything is drawn
    num_in_pass: int | None = None  # contexts that the pass of the latest `propose` ran for; None: all that joined
    has_pass: bool = False  # drafting runs a model, for those contexts only that join (`DraftContext.joins_pass`)

    def take_features(self, committed: CommittedFeatures) -> None:
        """Take the tapped layers' outputs of a step: once for every step, before `propose`, if there are taps."""
        return

    def forecast(self, contexts: Sequence[DraftContext]) -> list[Forecast]:
        """Return what to expect of each context's draft, from committed text and past verdicts alone.

        Called right before `propose` with the same committed text, `joins_pass` not yet decided and the pages for
        drafts not yet there. Draws nothing, runs no model. `propose` is not called where nobody joins and no draft is
        free.
        """
        return [NO_FORECAST] * len(contexts)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return one draft per context, in order, each at most `num_draft_tokens` long."""
        ...

    def begin(self, contexts: Sequence[DraftContext]) -> DraftRound:
        """Begin a round in which not every context may get a draft, without drawing anything."""
        return _PlainRound(self, contexts)

    def take_verdict(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Take what became of a draft: `draft` is the part that was verified, at least one token.

        Not called for drafts that were dropped (preemption, abort, no room), and before `release`.
        """
        return

    def release(self, request_id: str) -> None:
        """Forget a request that finished, was aborted or was preempted; unknown ids are harmless."""
        ...

    def calibration_errors(self) -> Sequence[float | None]:
        """Return the rolling calibration error of each position, None where unknown; nothing without a head."""
        return ()

    def reset_calibration(self) -> None:
        """Forget how confidences were corrected by what was accepted."""
        return

    def export_state(self) -> dict[str, Any]:
        """Return what was learned of all requests, as JSON values, for `restore_state` after a restart."""
        return {}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Go on from an exported state. What is unknown or ill-shaped is ignored, with a warning."""
        return


class _PlainRound(DraftRound):
    """A round of a proposer that knows nothing of a draft before it makes it."""

    def __init__(self, proposer: Proposer, contexts: Sequence[DraftContext]) -> None:
        self._proposer = proposer
        self._contexts = contexts

    def first_confidences(self) -> list[float]:
        raise AssertionError(f"the proposer {self._proposer.name} has no confidences")

    def draft(self, chosen: Sequence[int]) -> list[Draft]:
        return self._proposer.propose([self._contexts[i] for i in chosen])
