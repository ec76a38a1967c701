"""When a run has gone far enough to clear its job."""

from __future__ import annotations

import pytest

from headrace.broker.protocol.clearance import LONGEST_S, Clearance, clear_after_s


def test_the_first_two_clearances_take_half_a_second_and_each_further_one_twice_as_long_up_to_a_minute() -> None:
    assert [clear_after_s(n) for n in range(11)] == [0.5, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert clear_after_s(10**6) == LONGEST_S


@pytest.mark.parametrize(("tokens", "now_s", "cleared"), [(18, 6.0, True), (17, 60.0, False), (1000, 5.9, False)])
def test_it_takes_tokens_and_time(tokens: int, now_s: float, *, cleared: bool) -> None:
    watch = Clearance([10], [0], 1.0)
    assert not watch.reached(0, 11, 5.0)
    assert watch.reached(0, tokens, now_s) is cleared


def test_every_open_choice_has_to_go_on_or_end() -> None:
    watch = Clearance([0, 0, 5], [0, 1], 1.0)  # the third has ended before
    assert not watch.reached(0, 8, 0.0)
    assert not watch.reached(0, 20, 2.0)
    assert watch.reached(1, 1, 2.0, ended=True)
