"""How often repetitions in a text go on as they did before, by kind of repetition. No torch."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from dspark.speculation.acceptance_rates import AcceptanceRates, Rates


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
_WEAKEST = MatchKind(2, "plain")
_LEAST_MATCHED = tuple(sorted({kind.num_matched for kind in MATCH_PRIORS}, reverse=True))


def match_kind(num_matched: int, evidence: str) -> MatchKind:
    """Return the kind of a repetition of `num_matched` tokens; what is weaker than all kinds counts as the weakest."""
    kinds = (MatchKind(least, evidence) for least in _LEAST_MATCHED if least <= num_matched)
    return next((kind for kind in kinds if kind in MATCH_PRIORS), _WEAKEST)


class MatchRates:
    """The running rates of all kinds, of all requests and of each."""

    def __init__(self) -> None:
        self._rates = {kind: AcceptanceRates(prior) for kind, prior in MATCH_PRIORS.items()}

    def confidences(self, request_id: str, kind: MatchKind, length: int) -> list[float]:
        """Return c_1 .. c_k of a draft of `length` that continues a repetition."""
        return self._rates[kind].rates(request_id).confidences(length)

    def observe(self, request_id: str, kind: MatchKind, *, num_judged: int, num_accepted: int) -> None:
        """Count a repetition: of what was to follow `num_judged` tokens were decided, up to the first wrong one."""
        self._rates[kind].observe(request_id, num_judged=num_judged, num_accepted=num_accepted)

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are harmless. What it taught about all requests stays."""
        for rates in self._rates.values():
            rates.release(request_id)

    @property
    def num_requests(self) -> int:
        """Requests whose own rates are held, for the kind that has most."""
        return max(rates.num_requests for rates in self._rates.values())

    def export(self) -> dict[str, Any]:
        """Return what was counted in all requests, as JSON values."""
        return {_name(kind): rates.export() for kind, rates in self._rates.items()}

    def restore(self, state: object) -> None:
        """Go on from exported counts, before any request. Raises `ValueError` for anything else and changes nothing."""
        names = {_name(kind): kind for kind in self._rates}
        if not isinstance(state, Mapping) or not set(state) <= set(names):
            raise ValueError(f"{reprlib.repr(state)} is not counts by kind of match")
        restored = {names[name]: AcceptanceRates(MATCH_PRIORS[names[name]]) for name in state}
        for kind, rates in restored.items():
            rates.restore(state[_name(kind)])
        self._rates.update(restored)


def _name(kind: MatchKind) -> str:
    return f"{kind.num_matched} {kind.evidence}"
