"""How often drafts of one kind were accepted lately: in all requests, and in each one as far as it is known. No torch.

A draft's first token and the later ones have rates of their own: the rate of a later token is conditional on those
before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GLOBAL_DECAY = 0.998  # of the weight of earlier drafts per draft: the last 500 count
REQUEST_DECAY = 0.9  # the last 10: a list ends, code begins
PRIOR_WEIGHT = 20.0  # tokens that the starting rates count as
GLOBAL_WEIGHT = 4.0  # tokens that the rates of all requests count as for one of them


@dataclass(frozen=True)
class Rates:
    """Conditional acceptance of the first and of the later tokens of a draft."""

    first: float
    later: float

    def expected_accepted(self, length: int) -> float:
        """Return the number of accepted tokens to expect of a draft of `length`: the sum of its survivals."""
        survival, expected = self.first, 0.0
        for _ in range(length):
            expected += survival
            survival *= self.later
        return expected


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


@dataclass
class _Ratio:
    num_accepted: float = 0.0
    num_expected: float = 0.0

    def add(self, *, num_accepted: int, num_expected: float, decay: float) -> None:
        self.num_accepted = decay * self.num_accepted + num_accepted
        self.num_expected = decay * self.num_expected + num_expected

    def value(self, prior: float, weight: float) -> float:
        return (self.num_accepted + weight * prior) / (self.num_expected + weight)


@dataclass
class _Counts:
    first: _Ratio = field(default_factory=_Ratio)
    later: _Ratio = field(default_factory=_Ratio)

    def rates(self, prior: Rates, weight: float) -> Rates:
        return Rates(first=self.first.value(prior.first, weight), later=self.later.value(prior.later, weight))
