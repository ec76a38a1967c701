from __future__ import annotations

from headrace.planner.observation import stale
from tests.support.planner_sights import seen, worker


def test_load_is_stale_when_too_few_have_reported_lately() -> None:
    fresh, old = worker("a"), worker("b", report_age_s=60.0)
    assert not stale([fresh, old], fresh_s=5)
    assert stale([fresh, old, old], fresh_s=5)


def test_workers_that_have_just_joined_make_no_load_stale() -> None:
    assert not stale([worker("a", report_age_s=None)], fresh_s=5)
    assert not stale([], fresh_s=5)


def test_workers_are_found_by_role_and_state() -> None:
    there = seen(0, worker("a"), worker("b", state="asleep"), worker("d", "decode"))
    assert [one.worker for one in there.of_role("aggregated")] == ["a"]
    assert [one.worker for one in there.of_role("aggregated", "asleep")] == ["b"]
