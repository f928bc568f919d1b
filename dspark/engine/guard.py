"""Runs what may fail around drafting. Errors, hangs and slowness are counted, and a part that keeps failing rests.

Each part has a breaker of its own: a drafter that draws well must not hide that the planner fails in every step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from dspark.engine.breaker import FIRST_PAUSE_S, Breaker, BreakerState
from dspark.engine.compute_thread import ComputeThread, ComputeTimeout
from dspark.metrics import EngineMetrics

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FaultLimits:
    """When a call of the drafter is too slow to be of use, when it is taken to hang, and how long it rests then.

    In target passes, but small models get some time in any case, for a busy machine delays anybody by that.
    """

    slow_passes: float = 4.0
    slow_at_least_s: float = 0.5
    hanging_passes: float = 20.0
    hanging_at_least_s: float = 2.0
    first_pause_s: float = FIRST_PAUSE_S


class Part(Enum):
    """What fails on its own."""

    FEATURES = "taking features"
    PASS = "drafting"  # rounds in which somebody joins the drafter's pass
    DRAFTS = "drafting without a pass"
    PLAN = "planning"
    VERIFICATION = "verification"


class Guard:
    """The breakers of all parts, and the calls behind them. `falls_back` False: every error is the caller's.

    A call that hangs is left behind and may go on for ever. Until it is back nothing may touch the drafter.
    """

    def __init__(
        self,
        drafter_name: str,
        *,
        compute: ComputeThread,
        metrics: EngineMetrics,
        falls_back: bool,
        limits: FaultLimits,
    ) -> None:
        self.target_s = 0.0  # of the latest target pass; limits follow it
        self.falls_back = falls_back
        self._drafter_name = drafter_name
        self._compute = compute
        self._metrics = metrics
        self._limits = limits
        self._breakers = {part: self.make_breaker() for part in Part}
        self._slow: set[Part] = set()  # whose latest call came back too late to count as a success
        self._put_off: deque[Callable[[], None]] = deque()
        self._num_failures = 0

    def make_breaker(self) -> Breaker:
        """Return a breaker for something smaller than a part, as patient as theirs."""
        return Breaker(first_pause_s=self._limits.first_pause_s)

    @property
    def state(self) -> BreakerState:
        """The worst state of any part."""
        states = {breaker.state for breaker in self._breakers.values()}
        return next(s for s in (BreakerState.OPEN, BreakerState.PROBING, BreakerState.CLOSED) if s in states)

    @property
    def is_blocked(self) -> bool:
        """Whether a call that was left behind has not come back."""
        return any(breaker.is_blocked for breaker in self._breakers.values())

    def allows(self, *parts: Part) -> bool:
        """Whether all these parts may be tried now."""
        return all(self._breakers[part].allows for part in parts)

    def computed(self, part: Part, call: Callable[[], T]) -> T | None:
        """Return what a call of the drafter returns in the compute thread; None if it failed or did not come back."""
        if not self.falls_back:
            return self._compute.run(call)
        start = time.perf_counter()
        try:
            result = self._compute.run(
                call, timeout_s=self._limit_s(self._limits.hanging_passes, self._limits.hanging_at_least_s)
            )
        except Exception as error:  # a drafter must never cost a request its answer
            self.failed(part, error)
            return None
        seconds = time.perf_counter() - start
        if seconds > self._limit_s(self._limits.slow_passes, self._limits.slow_at_least_s):
            self._slow.add(part)
            self.failed(part, ComputeTimeout(seconds))
        return result

    def here(self, part: Part, call: Callable[[], T]) -> T | None:
        """Return what a call returns in this thread, or None if it failed. For what computes no tensors."""
        try:
            return call()
        except Exception as error:
            if not self.falls_back:
                raise
            self.failed(part, error)
        return None

    def when_free(self, call: Callable[[], None]) -> None:
        """Make a short call of the drafter in this thread: now, or when what was left behind has come back."""
        self._put_off.append(call)
        self.settle()

    def settle(self) -> None:
        """Make the calls that were put off, if they can be made now. To be called before any other of the drafter."""
        while self._put_off and not self.is_blocked:
            self.here(Part.DRAFTS, self._put_off.popleft())

    def failed(self, part: Part, error: Exception) -> None:
        """Count a failure against a part."""
        self.count_failure(error)
        left_behind = error.call if isinstance(error, ComputeTimeout) else None
        if self._breakers[part].failed(left_behind):
            self._metrics.count_breaker("open")
            logger.warning("%s (%s) is switched off for a while: %s", part.value, self._drafter_name, error)

    def went_well(self, *parts: Part) -> None:
        """Count a success of parts, but for those whose call was too slow."""
        for part in parts:
            if part in self._slow:
                self._slow.discard(part)
            elif self._breakers[part].succeeded():
                self._metrics.count_breaker("closed")
                logger.warning("%s (%s) works again", part.value, self._drafter_name)

    def count_failure(self, error: Exception) -> None:
        """Count a failure that is held against no part."""
        self._num_failures += 1
        self._metrics.num_drafter_failures.inc()
        if self._num_failures in (1, 10, 100) or self._num_failures % 1000 == 0:  # not at every step
            logger.error(
                "the %s drafter failed (%d times so far); rounds go on without drafts",
                self._drafter_name,
                self._num_failures,
                exc_info=error,
            )

    def _limit_s(self, num_passes: float, at_least_s: float) -> float:
        return max(at_least_s, num_passes * self.target_s)
