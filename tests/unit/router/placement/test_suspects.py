"""A suspect is out of the turns of other requests for as long as it is one, also after a placement that did not happen."""

from __future__ import annotations

from tests.support.router.placement_pool import Pool


def test_a_request_without_crashes_is_not_held() -> None:
    pool = Pool("ab")
    pool.offer("r")
    pool.scheduler.assess("r", limit=1, crashes=2)
    assert pool.placement().reason != "trial"


def test_a_placement_that_did_not_happen_leaves_a_suspect_suspect() -> None:
    pool = Pool("abc")
    pool.offer("s", suspect=True)
    pool.scheduler.assess("s", limit=2, crashes=2)
    placement = pool.placement()
    pool.scheduler.unplace(placement, pool.now)
    pool.report(placement.worker)
    again = pool.placement()
    assert (again.reason, again.limit, again.crashes) == ("trial", 2, 2)


def test_an_ordinary_placement_that_did_not_happen_makes_no_suspect() -> None:
    pool = Pool("abc")
    pool.offer("r")
    placement = pool.placement()
    pool.scheduler.unplace(placement, pool.now)
    assert pool.placement().reason != "trial"


def test_suspects_that_wait_for_lost_workers_are_counted_until_one_is_back() -> None:
    pool = Pool("ab")
    pool.offer("s", suspect=True)
    pool.scheduler.assess("s", limit=1, crashes=2)
    pool.scheduler.remove_worker("b", pool.now)
    assert pool.decide() == []
    assert pool.scheduler.suspects_awaiting_lost == 1
    pool.join("c")
    assert pool.placement().reason == "trial"
    assert pool.scheduler.suspects_awaiting_lost == 0


def test_suspects_of_a_pool_without_workers_do_not_count_as_waiting_for_a_trial() -> None:
    pool = Pool("ab")
    pool.offer("s", suspect=True)
    pool.scheduler.assess("s", limit=1, crashes=2)
    pool.scheduler.remove_worker("b", pool.now)
    pool.decide()
    pool.scheduler.remove_worker("a", pool.now)
    assert pool.scheduler.suspects_awaiting_lost == 0
