"""Rests from planning where it gains too little: at a full batch, looking for drafts costs more than it finds.

No torch, no clock: time is that of predicted steps.
"""

from __future__ import annotations

LOOK_ROUNDS = 4  # looked at before a rest is decided
# Of tokens per second, by plan. Below it planning and what it misjudges take as much: 16 requests on two cores lost 2 %
# of a step to planning, and their n-gram drafts of 4 % promised gain came to nothing.
MIN_GAIN = 0.04
FIRST_REST_ROUNDS = 8
MAX_REST_S = 1.0  # so that a change of text or load is met soon
MAX_LOAD_CHANGE = 1.5  # of the number of requests, by which a rest ends at once


class Resting:
    """Decides round by round whether to look for drafts at all. Rests double while looks find little."""

    def __init__(self) -> None:
        self._gains: list[float] = []  # of the rounds of this look
        self._rounds_left = 0
        self._next_rest = FIRST_REST_ROUNDS
        self._num_requests = 0  # when the rest began

    def rests(self, num_requests: int) -> bool:
        """Return whether this round is one of a rest; call it once a round."""
        if self._rounds_left == 0:
            return False
        more, fewer = max(num_requests, self._num_requests), min(num_requests, self._num_requests)
        if more > MAX_LOAD_CHANGE * fewer:
            self._rounds_left, self._next_rest = 0, FIRST_REST_ROUNDS
            return False
        self._rounds_left -= 1
        return True

    def observe(self, gain: float, num_requests: int, round_s: float) -> None:
        """Take the gain that a round which looked promises (0.1: a tenth more tokens per second)."""
        self._gains.append(gain)
        if len(self._gains) < LOOK_ROUNDS:
            return
        mean = sum(self._gains) / len(self._gains)
        self._gains.clear()
        if mean >= MIN_GAIN:
            self._next_rest = FIRST_REST_ROUNDS
            return
        self._rounds_left = min(self._next_rest, int(MAX_REST_S / round_s))
        self._next_rest *= 2
        self._num_requests = num_requests
