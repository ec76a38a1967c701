"""A request in its last life runs alone: whatever is placed beside it would stand still until it has ended."""

from __future__ import annotations

from tests.support.router.placement_pool import Pool


def test_nothing_is_placed_beside_a_request_in_its_last_life() -> None:
    pool = Pool()
    pool.offer("last", alone=True)
    (worker,) = pool.placed().values()
    other = {"a": "b", "b": "a"}[worker]
    for n in range(6):
        pool.offer(f"r{n}")
    assert set(pool.placed().values()) == {other}


def test_a_worker_that_says_so_gets_nothing_until_it_has_ended() -> None:
    pool = Pool("a")
    pool.report("a", slots=0, running=1)
    pool.offer("r1")
    assert pool.placed() == {}
    pool.report("a")
    assert pool.placed() == {"r1": "a"}
