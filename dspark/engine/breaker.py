"""Switches off what keeps failing and tries it again, first soon, then ever more rarely. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from typing import Any

MAX_FAILURES_IN_A_ROW = 3
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
FORGIVEN_AFTER_S = 60.0  # without a failure, the next pause is a short one again


class BreakerState(Enum):
    """Whether calls are made."""

    CLOSED = "closed"  # as usual
    OPEN = "open"  # not before the pause is over
    PROBING = "probing"  # one call may try; its outcome decides


class Breaker:
    """Three failures in a row, or a call left behind, open it; after a pause a call may try, and success closes it.

    The pause doubles with each opening and each failed try, so that what fails now and then is not tried all the time.
    While a call that was left behind has not come back, nothing is tried.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._clock = clock
        self._num_failures = 0  # in a row
        self._first_pause_s = self._next_pause_s = first_pause_s
        self._open_until: float | None = None
        self._last_failure = float("-inf")
        self._left_behind: Future[Any] | None = None

    @property
    def state(self) -> BreakerState:
        """The state now."""
        if self._open_until is None:
            return BreakerState.CLOSED
        is_waiting = self.is_blocked or self._clock() < self._open_until
        return BreakerState.OPEN if is_waiting else BreakerState.PROBING

    @property
    def is_blocked(self) -> bool:
        """Whether a call that was left behind has not come back, so that its object must not be touched."""
        return self._left_behind is not None and not self._left_behind.done()

    @property
    def allows(self) -> bool:
        """Whether a call may be made now."""
        return self.state is not BreakerState.OPEN

    def failed(self, left_behind: Future[Any] | None = None) -> bool:
        """Count a failure; `left_behind` is the call if it did not come back. True when this opens the breaker."""
        now, state = self._clock(), self.state
        was_open = state is not BreakerState.CLOSED
        if now - self._last_failure > FORGIVEN_AFTER_S:
            self._next_pause_s = self._first_pause_s
        self._last_failure = now
        self._num_failures += 1
        self._left_behind = left_behind or self._left_behind
        if left_behind is None and (
            state is BreakerState.OPEN  # not a try: what else fails during the pause does not make it longer
            or (state is BreakerState.CLOSED and self._num_failures < MAX_FAILURES_IN_A_ROW)
        ):
            return False
        self._open_until = now + self._next_pause_s
        self._next_pause_s = min(2 * self._next_pause_s, MAX_PAUSE_S)
        return not was_open

    def succeeded(self) -> bool:
        """Count a call that went well. True when this closes the breaker."""
        was_open = self._open_until is not None
        self._num_failures, self._open_until = 0, None
        return was_open
