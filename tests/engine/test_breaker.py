"""The breaker: what opens it, when it tries again, what closes it."""

from __future__ import annotations

from concurrent.futures import Future

from dspark.engine.breaker import FIRST_PAUSE_S, FORGIVEN_AFTER_S, MAX_PAUSE_S, Breaker, BreakerState


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    return breaker


def test_two_failures_and_a_success_leave_it_closed() -> None:
    breaker = Breaker(Clock())

    assert [breaker.failed(), breaker.failed(), breaker.succeeded(), breaker.failed(), breaker.failed()] == [False] * 5
    assert breaker.state is BreakerState.CLOSED


def test_three_failures_in_a_row_open_it_for_the_first_pause() -> None:
    clock = Clock()
    breaker = opened(clock)

    assert breaker.state is BreakerState.OPEN and not breaker.allows
    clock.now += FIRST_PAUSE_S
    assert breaker.state is BreakerState.PROBING and breaker.allows


def test_a_try_that_succeeds_closes_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += FIRST_PAUSE_S

    assert breaker.succeeded() is True
    assert breaker.state is BreakerState.CLOSED


def test_each_try_that_fails_doubles_the_pause_up_to_a_limit() -> None:
    clock = Clock()
    breaker = opened(clock)
    pauses = []
    pause = FIRST_PAUSE_S
    for _ in range(9):
        clock.now += pause
        assert breaker.allows
        assert breaker.failed() is False  # it was open already
        pause = min(2 * pause, MAX_PAUSE_S)
        clock.now += 0.99 * pause
        assert not breaker.allows
        clock.now -= 0.99 * pause
        pauses.append(pause)

    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_a_relapse_meets_a_longer_pause_and_a_late_one_a_short_one() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += FIRST_PAUSE_S
    breaker.succeeded()
    for _ in range(3):
        breaker.failed()
    clock.now += FIRST_PAUSE_S
    assert not breaker.allows

    clock.now += FIRST_PAUSE_S
    breaker.succeeded()
    clock.now += FORGIVEN_AFTER_S + 1
    for _ in range(3):
        breaker.failed()
    clock.now += FIRST_PAUSE_S
    assert breaker.allows


def test_a_call_left_behind_opens_it_at_once_and_blocks_until_it_is_back() -> None:
    clock, call = Clock(), Future[None]()
    breaker = Breaker(clock)

    assert breaker.failed(left_behind=call) is True
    clock.now += 1000.0
    assert breaker.is_blocked and not breaker.allows

    call.set_result(None)
    assert not breaker.is_blocked and breaker.allows


def test_what_fails_while_it_is_open_does_not_make_the_pause_longer() -> None:
    clock = Clock()
    breaker = opened(clock)
    for _ in range(5):
        assert breaker.failed() is False
    clock.now += FIRST_PAUSE_S

    assert breaker.allows


def test_the_first_pause_is_as_asked() -> None:
    clock = Clock()
    breaker = Breaker(clock, first_pause_s=7.0)
    for _ in range(3):
        breaker.failed()
    clock.now += 6.9
    assert not breaker.allows
    clock.now += 0.1
    assert breaker.allows
