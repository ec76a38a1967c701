from __future__ import annotations

from headrace.planner.hysteresis import Hysteresis


def test_the_most_that_was_needed_lately_counts() -> None:
    some = Hysteresis(window_s=60)
    assert some.note(5, at=0) == 5
    assert some.note(2, at=30) == 5
    assert some.note(2, at=61) == 2


def test_a_number_that_went_up_stays_for_two_start_ups() -> None:
    some = Hysteresis(window_s=60)
    assert some.may_go_down(at=0, start_s=100)
    some.went(1, at=0)
    assert not some.may_go_down(at=199, start_s=100)
    assert some.may_go_down(at=200, start_s=100)


def test_a_history_is_stored_and_taken_over() -> None:
    some, again = Hysteresis(window_s=60), Hysteresis(window_s=60)
    some.note(5, at=0)
    some.went(2, at=0)
    again.load(**some.dump())  # type: ignore[arg-type]
    assert again.note(1, at=10) == 5
    assert not again.may_go_down(at=10, start_s=100)
