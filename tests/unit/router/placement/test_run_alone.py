"""A request in its last life runs alone: whatever is placed beside it would stand still until it has ended."""

from __future__ import annotations

import pytest

from tests.support.router.placement_pool import Pool, chain


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


@pytest.mark.parametrize("others", [0, 60], ids=["few", "many"])
def test_nothing_is_held_back_for_the_worker_that_has_its_prefix_and_runs_one_alone(others: int) -> None:
    """Whether the choice is made one by one or with arrays."""
    pool = Pool()
    prefix = chain(1, 60)
    pool.holds("a", prefix)
    pool.report("a", slots=0, running=1)
    pool.report("b", running=0)
    names = [f"r{n}" for n in range(1 + others)]
    for name in names:
        pool.offer(name, prefix)
    assert pool.placed()["r0"] == "b"


def test_nothing_is_held_back_for_a_decode_worker_that_runs_one_alone() -> None:
    pool = Pool("")
    pool.apart(decode="ab", prefill="p")
    prefix = chain(1, 60)
    pool.holds("a", prefix[:50])
    pool.report("a", slots=0, running=1)
    pool.report("b")
    pool.report("p")
    pool.offer("r0", prefix)
    assert pool.placed() == {"r0": "b"}
