"""How often drafts of one kind were accepted lately: in all requests, and in each one as far as it is known. No torch.

A draft's first token and the later ones have rates of their own (`position_rates` tells every position): the rate of
a later token is conditional on those before it.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

GLOBAL_DECAY = 0.998  # of the weight of earlier drafts per draft: the last 500 count
REQUEST_DECAY = 0.9  # the last 10: a list ends, code begins
PRIOR_WEIGHT = 20.0  # tokens that the starting rates count as
GLOBAL_WEIGHT = 4.0  # tokens that the rates of all requests count as for one of them
_MOST_COUNTED = 1e6  # no exported count is above: decay forgets


@dataclass(frozen=True)
class Rates:
    """Conditional acceptance of the first and of the later tokens of a draft."""

    first: float
    later: float

    def confidences(self, length: int) -> list[float]:
        """Return c_1 .. c_k of a draft of `length`, each at most 1."""
        return [min(1.0, self.first), *[min(1.0, self.later)] * (length - 1)][:length]

    def expected_accepted(self, length: int) -> float:
        """Return the number of accepted tokens to expect of a draft of `length`: the sum of its survivals."""
        survival, expected = self.first, 0.0
        for _ in range(length):
            expected += survival
            survival *= self.later
        return expected


DRAFTER_PRIOR = Rates(first=0.5, later=0.5)  # of a drafter of which nothing is known


class AcceptanceRates:
    """The running rates of one kind of draft.

    Drafters that say themselves how likely their first token is give that number with each draft; then `first` is by
    how much the truth exceeds what they say.
    """

    def __init__(self, prior: Rates) -> None:
        self._prior = prior
        self._all = _Counts()
        self._by_request: dict[str, _Counts] = {}

    def rates(self, request_id: str) -> Rates:
        """Return the rates to expect in a request."""
        overall = self._all.rates(self._prior, PRIOR_WEIGHT)
        own = self._by_request.get(request_id)
        return overall if own is None else own.rates(overall, GLOBAL_WEIGHT)

    def observe(self, request_id: str, *, num_judged: int, num_accepted: int, stated_first: float = 1.0) -> None:
        """Count a draft: of its tokens `num_judged` were decided, up to and including the first that was wrong."""
        assert 0 <= num_judged - num_accepted <= 1 and num_judged > 0, (num_judged, num_accepted)
        own = self._by_request.setdefault(request_id, _Counts())
        for counts, decay in ((self._all, GLOBAL_DECAY), (own, REQUEST_DECAY)):
            counts.first.add(num_accepted=min(num_accepted, 1), num_expected=stated_first, decay=decay)
            if num_judged > 1:
                counts.later.add(num_accepted=num_accepted - 1, num_expected=num_judged - 1, decay=decay)

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are harmless."""
        self._by_request.pop(request_id, None)

    @property
    def num_requests(self) -> int:
        """Requests whose own rates are held."""
        return len(self._by_request)

    def export(self) -> dict[str, Any]:
        """Return what was counted in all requests, as JSON values."""
        return {"first": self._all.first.export(), "later": self._all.later.export()}

    def restore(self, state: object) -> None:
        """Go on from exported counts. Raises `ValueError` for anything else, and is left as it was."""
        if not isinstance(state, Mapping) or set(state) != {"first", "later"}:
            raise ValueError(f"{reprlib.repr(state)} is not a first and a later count")
        self._all = _Counts(Ratio.restored(state["first"]), Ratio.restored(state["later"]))


@dataclass
class Ratio:
    """Accepted tokens among those of which something was expected, the latest counting most."""

    num_accepted: float = 0.0
    num_expected: float = 0.0

    def add(self, *, num_accepted: float, num_expected: float, decay: float) -> None:
        """Count once more, after the earlier counts lost weight."""
        self.num_accepted = decay * self.num_accepted + num_accepted
        self.num_expected = decay * self.num_expected + num_expected

    def value(self, prior: float, weight: float) -> float:
        """Return the rate, where `weight` tokens of rate `prior` count besides."""
        return (self.num_accepted + weight * prior) / (self.num_expected + weight)

    def export(self) -> list[float]:
        """Return both counts."""
        return [self.num_accepted, self.num_expected]

    @classmethod
    def restored(cls, state: object) -> Ratio:
        """Return exported counts. Raises `ValueError` for anything else."""
        if (
            not isinstance(state, list)
            or len(state) != 2
            or not all(type(n) in (int, float) and 0.0 <= n <= _MOST_COUNTED for n in state)
        ):
            raise ValueError(f"{reprlib.repr(state)} is not a pair of counts")
        return cls(float(state[0]), float(state[1]))


def restore_parts(proposer_name: str, state: object, restorers: Mapping[str, Callable[[Any], None]]) -> None:
    """Hand each part of an exported state to its restorer; what is unknown or raises `ValueError` is warned of."""
    parts = state if isinstance(state, Mapping) else {"the whole": state}
    for name, part in parts.items():
        try:
            if name not in restorers:
                raise ValueError("nothing here is known by that name")
            restorers[name](part)
        except ValueError as error:
            logger.warning("saved rates %r of the %s drafter are ignored: %s", name, proposer_name, error)


@dataclass
class _Counts:
    first: Ratio = field(default_factory=Ratio)
    later: Ratio = field(default_factory=Ratio)

    def rates(self, prior: Rates, weight: float) -> Rates:
        return Rates(first=self.first.value(prior.first, weight), later=self.later.value(prior.later, weight))
