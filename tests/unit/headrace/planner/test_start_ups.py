from __future__ import annotations

from headrace.planner.start_ups import StartUps
from tests.support.planner_sights import worker


def test_a_start_is_under_way_until_its_worker_is_there_and_its_time_is_measured() -> None:
    starts = StartUps(first_s=60)
    starts.see([worker("a")], at=0)
    starts.asked("aggregated", at=10)
    starts.see([worker("a")], at=15)
    assert (starts.under_way("aggregated"), starts.p90_s) == (1, 60)
    starts.see([worker("a"), worker("b")], at=40)
    assert (starts.under_way("aggregated"), starts.p90_s) == (0, 30)


def test_a_start_that_never_shows_is_given_up_so_that_it_does_not_count_as_supply_for_ever() -> None:
    starts = StartUps(first_s=60)
    starts.see([], at=0)
    starts.asked("aggregated", at=0)
    starts.see([], at=170)
    assert starts.under_way("aggregated") == 1
    starts.see([], at=181)
    assert (starts.under_way("aggregated"), starts.lost) == (0, 1)


def test_a_worker_that_somebody_else_has_started_tells_its_own_time() -> None:
    starts = StartUps(first_s=60)
    starts.see([], at=0)
    starts.see([worker("a", start_s=12.0)], at=5)
    assert starts.p90_s == 12.0


def test_the_slow_ones_count() -> None:
    starts = StartUps(first_s=60)
    starts.load([10.0] * 8 + [50.0, 90.0], [], None)
    assert starts.p90_s == 50.0


def test_after_a_restart_a_start_is_still_under_way() -> None:
    starts, again = StartUps(first_s=60), StartUps(first_s=60)
    starts.see([worker("a")], at=0)
    starts.asked("decode", at=10)
    again.load(**starts.dump())  # type: ignore[arg-type]
    again.see([worker("a"), worker("d", "decode")], at=30)
    assert (again.under_way("decode"), again.p90_s) == (0, 20)
