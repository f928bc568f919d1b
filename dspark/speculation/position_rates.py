"""How often a drafter's proposals were accepted lately, position by position: what to expect of its next draft.

All rates are conditional: of a position whose predecessors were accepted. They are those of all requests, bent for each
one by its own latest drafts. No torch.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

from dspark.speculation.acceptance_rates import GLOBAL_WEIGHT, PRIOR_WEIGHT, REQUEST_DECAY, Rates, Ratio

# The last 100 drafts that reached a position count: with one request some seconds of text, enough to tell 0.4 from 0.5.
GLOBAL_DECAY = 0.99


@dataclass(frozen=True, kw_only=True)
class _Stated:
    num_tokens: int  # of the text that the draft continues
    confidences: Sequence[float]  # c_1 .. c_k


class PositionRates:
    """The running acceptance rates of one drafter.

    What a drafter states of a draft (`note_stated`) stands for what verification did not get to: drafts are verified as
    far as they promise something, so verified tokens alone would show the better drafts only. A statement may depend on
    drawn tokens, so it counts no sooner than when the text has gone on, which makes those tokens the past. A draft that
    is dropped before that is made again with the same noise; what was stated of it never counts.
    """

    def __init__(self, prior: Rates) -> None:
        self._prior = prior
        self._all: list[Ratio] = []  # by position, as far as one was reached
        self._by_request: dict[str, list[Ratio]] = {}
        self._stated: dict[str, _Stated] = {}
        self._overall: list[float] = []  # rates of all requests; made anew after each count

    def confidences(self, request_id: str, length: int) -> list[float]:
        """Return c_1 .. c_k to expect of a draft of `length`."""
        overall = self._overall_rates(length)
        own = self._by_request.get(request_id, ())
        bent = [ratio.value(rate, GLOBAL_WEIGHT) for ratio, rate in zip(own, overall, strict=False)]
        return bent + overall[len(bent) :]

    def note_stated(self, request_id: str, *, num_tokens: int, confidences: Sequence[float]) -> None:
        """Keep what the drafter stated of a draft after a text of `num_tokens`, in place of what it stated before."""
        self._stated[request_id] = _Stated(num_tokens=num_tokens, confidences=confidences)

    def settle(self, request_id: str, num_tokens: int) -> None:
        """Count the last stated draft if the text, now of `num_tokens`, went on without any of it being verified."""
        stated = self._stated.pop(request_id, None)
        if stated is not None and num_tokens > stated.num_tokens:
            self._count(request_id, stated.confidences)

    def observe(self, request_id: str, *, num_verified: int, num_accepted: int) -> None:
        """Count a draft of which the first `num_verified` tokens were verified, and the rest as it was stated."""
        assert 0 <= num_accepted <= num_verified > 0, (num_verified, num_accepted)
        stated = self._stated.pop(request_id, None)
        chances = [1.0] * num_accepted
        if num_accepted < num_verified:
            chances.append(0.0)
        elif stated is not None:
            chances += stated.confidences[num_verified:]
        self._count(request_id, chances)

    def release(self, request_id: str) -> None:
        """Forget a request, and what was stated of its last draft; unknown ids are harmless."""
        self._by_request.pop(request_id, None)
        self._stated.pop(request_id, None)

    @property
    def num_requests(self) -> int:
        """Requests of which anything is held."""
        return len(self._by_request.keys() | self._stated.keys())

    def export(self) -> list[list[float]]:
        """Return what was counted in all requests, as JSON values."""
        return [ratio.export() for ratio in self._all]

    def restore(self, state: object) -> None:
        """Go on from exported counts. Raises `ValueError` for anything else, and is left as it was."""
        if not isinstance(state, list):
            raise ValueError(f"{reprlib.repr(state)} is not a list of counts by position")
        restored = [Ratio.restored(counts) for counts in state]
        if any(ratio.num_accepted > ratio.num_expected for ratio in restored):
            raise ValueError(f"{reprlib.repr(state)} holds more accepted than judged tokens")
        self._all, self._overall = restored, []

    def _count(self, request_id: str, chances: Sequence[float]) -> None:
        """Count a draft whose tokens were accepted with these chances: 1, 0, or as they were stated."""
        own = self._by_request.setdefault(request_id, [])
        for ratio in own:  # time passes for a request whether or not a position is reached
            ratio.add(num_accepted=0.0, num_expected=0.0, decay=REQUEST_DECAY)
        reached = 1.0  # the chance that a position was reached
        for k, chance in enumerate(chances):
            if not reached > 0.0:
                break
            accepted = reached * (min(1.0, chance) if chance > 0.0 else 0.0)  # NaN counts as 0
            for ratios, decay in ((self._all, 1.0 - (1.0 - GLOBAL_DECAY) * reached), (own, 1.0)):
                if k == len(ratios):
                    ratios.append(Ratio())
                ratios[k].add(num_accepted=accepted, num_expected=reached, decay=decay)
            reached = accepted
        self._overall = []

    def _overall_rates(self, length: int) -> list[float]:
        if len(self._overall) < length:
            priors = self._prior.confidences(max(length, len(self._all)))
            seen = [ratio.value(prior, PRIOR_WEIGHT) for ratio, prior in zip(self._all, priors, strict=False)]
            self._overall = seen + priors[len(seen) :]
        return self._overall[:length]
