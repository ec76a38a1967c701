"""Requests that have waited for too long are refused once each, with the reason that came first."""

from __future__ import annotations

from headrace.router.placement.types import Decision, Shed
from tests.support.router.placement_pool import Pool


def codes(decisions: list[Decision]) -> list[tuple[str, str]]:
    return [(one.request.id, one.code) for one in decisions if isinstance(one, Shed)]


def test_a_request_that_is_late_and_that_no_worker_may_take_is_refused_once() -> None:
    pool = Pool("a", no_worker_s=3.0)
    pool.offer("both", worker="gone", tokens=5, deadline_s=pool.now + 2)
    pool.offer("patient", worker="gone", tokens=5)
    pool.pass_time(3.1)
    assert codes(pool.decide()) == [("both", "deadline"), ("patient", "no_eligible_worker")]
    assert pool.scheduler.waiting == 0
    assert pool.decide() == []


def test_without_any_worker_a_request_waits_for_one_up_to_its_deadline() -> None:
    pool = Pool("", no_worker_s=3.0)
    pool.offer("hurried", tokens=5, deadline_s=pool.now + 10)
    pool.offer("patient", tokens=5)
    pool.pass_time(9.0)
    assert codes(pool.decide()) == []
    pool.pass_time(2.0)
    assert codes(pool.decide()) == [("hurried", "deadline")]
    pool.join("a")
    assert pool.placed() == {"patient": "a"}
