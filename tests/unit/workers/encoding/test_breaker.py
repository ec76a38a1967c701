"""A store that fails is left alone for a while, longer each time."""

from __future__ import annotations

from headrace.workers.encoding.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_the_pause_doubles_up_to_its_longest_and_ends_with_a_success() -> None:
    clock = Clock()
    breaker = Breaker(clock, first_s=1.0, longest_s=3.0)
    assert breaker.closed
    for pause_s in (1.0, 2.0, 3.0, 3.0):
        breaker.failed()
        clock.at += pause_s - 0.01
        assert not breaker.closed
        clock.at += 0.02
        assert breaker.closed
    breaker.failed()
    breaker.succeeded()
    assert breaker.closed
    breaker.failed()
    clock.at += 1.01
    assert breaker.closed


def test_failures_of_requests_that_ran_together_count_once() -> None:
    clock = Clock()
    breaker = Breaker(clock, first_s=1.0)
    for _ in range(8):
        breaker.failed()
    clock.at += 1.01
    assert breaker.closed
