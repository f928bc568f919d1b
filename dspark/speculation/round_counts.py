"""Counts of decoding rounds by position of the draft, from serving or from its simulation; what both are compared by.

No torch. K proposals of the longest draft.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass(kw_only=True)
class RoundCounts:
    """What rounds proposed, accepted and emitted; fractions where each round counts with its probability.

    Every decoding pass is a round, one without a proposal too (it emits one token); the pass that ends a prefill is
    none. Proposals behind the end of a text count nowhere, for nobody gets them.
    """

    num_texts: int = 0
    num_rounds: float = 0
    num_emitted: float = 0  # tokens that came out of these rounds, bonus tokens included
    reached: list[float] = field(default_factory=list)  # [K] proposals judged: all earlier ones of the draft were right
    accepted: list[float] = field(default_factory=list)  # [K] of these, accepted

    @property
    def accepted_length(self) -> float | None:
        """Tokens per round, bonus token included (tau in the paper); None without a round."""
        return self.num_emitted / self.num_rounds if self.num_rounds else None

    @property
    def conditional_acceptance(self) -> list[float | None]:  # [K]
        """Acceptance of each position where it was judged; None where it never was."""
        return [a / r if r else None for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def survival(self) -> list[float | None]:  # [K]
        """Share of all rounds in which the draft was right up to each position."""
        return [a / self.num_rounds if self.num_rounds else None for a in self.accepted]

    def add_round(self, *, num_proposed: int, num_accepted: int, num_emitted: int) -> None:
        """Count one round. Fewer tokens emitted than accepted means that the text ended inside the draft."""
        assert num_accepted <= num_proposed and 0 <= num_emitted <= num_accepted + 1, (num_accepted, num_emitted)
        self.num_rounds += 1
        self.num_emitted += num_emitted
        self.cover(num_proposed)
        num_right = min(num_accepted, num_emitted)
        num_judged = min(num_right + 1, num_proposed) if num_emitted > num_accepted else num_right
        for position in range(num_judged):
            self.reached[position] += 1
            self.accepted[position] += position < num_right

    def cover(self, num_positions: int) -> None:
        """Have at least this many positions."""
        for values in (self.reached, self.accepted):
            values.extend([0] * (num_positions - len(values)))

    def plus(self, other: RoundCounts) -> RoundCounts:
        """Return the counts of both together."""
        return RoundCounts(
            num_texts=self.num_texts + other.num_texts,
            num_rounds=self.num_rounds + other.num_rounds,
            num_emitted=self.num_emitted + other.num_emitted,
            reached=[a + b for a, b in zip_longest(self.reached, other.reached, fillvalue=0)],
            accepted=[a + b for a, b in zip_longest(self.accepted, other.accepted, fillvalue=0)],
        )

    def to_json(self) -> dict[str, Any]:
        """Return counts and figures as JSON values."""
        return {
            "num_texts": self.num_texts,
            "num_rounds": _rounded(self.num_rounds),
            "num_emitted": _rounded(self.num_emitted),
            "accepted_length": _rounded(self.accepted_length),
            "conditional_acceptance": [_rounded(value) for value in self.conditional_acceptance],
            "survival": [_rounded(value) for value in self.survival],
            "reached": [_rounded(value) for value in self.reached],
            "accepted": [_rounded(value) for value in self.accepted],
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
