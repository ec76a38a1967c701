"""Each data-parallel rank of a worker is a place of its own for the index, the costs and the choice."""

from __future__ import annotations

import pytest

from headrace.broker.places import worker_of
from headrace.router.placement.pool import WAIT_S
from headrace.router.placement.types import Placement
from tests.support.router.placement_pool import Pool, chain

PROMPT = chain(1, 20)


def ranked(*places: str, **settings: object) -> Pool:
    pool = Pool("", **settings)
    for place in places:
        pool.join(place)
    return pool


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_goes_to_the_rank_that_has_its_prefix(rank: int) -> None:
    pool = ranked("w~0", "w~1")
    pool.holds(f"w~{rank}", PROMPT)
    pool.offer("r", PROMPT)
    placement = pool.placement()
    assert (placement.worker, placement.reason) == (f"w~{rank}", "prefix")
    assert placement.uncached < 512


def test_a_request_goes_to_the_rank_with_less_to_do() -> None:
    pool = ranked("w~0", "w~1")
    pool.report("w~0", running=1, queued_prefill_tokens=20_000)
    pool.offer("r", PROMPT)
    assert pool.placed() == {"r": "w~1"}


def test_a_full_rank_gets_nothing_while_another_has_room() -> None:
    pool = ranked("w~0", "w~1")
    pool.holds("w~0", PROMPT)
    pool.report("w~0", running=8)
    for n in range(3):
        pool.offer(f"r{n}", chain(n + 2, 1))
    assert set(pool.placed().values()) == {"w~1"}


def test_a_named_worker_means_any_of_its_ranks_and_a_named_rank_that_one() -> None:
    pool = ranked("v", "w~0", "w~1")
    pool.holds("w~1", PROMPT)
    pool.offer("any", PROMPT, worker="w")
    assert pool.placed() == {"any": "w~1"}
    pool.offer("one", PROMPT, worker="w~0")
    assert pool.placed() == {"one": "w~0"}


def suspects(pool: Pool, names: str, limit: int) -> dict[str, str]:
    for name in names:
        pool.offer(name, suspect=True)
        pool.scheduler.assess(name, limit=limit, crashes=2)
    return pool.placed()


def test_the_ranks_of_a_worker_are_on_trial_together_and_their_suspects_count_together() -> None:
    pool = ranked("v", "u", "w~0", "w~1")
    pool.report("v", running=2)
    pool.report("u", running=2)
    placed = suspects(pool, "abc", limit=2)
    assert len(placed) == 2
    assert {worker_of(place) for place in placed.values()} == {"w"}, "it has the fewest jobs"
    for n in range(4):
        pool.offer(f"r{n}")
    decisions = [one for one in pool.decide() if isinstance(one, Placement)]
    assert {worker_of(one.worker) for one in decisions} == {"u", "v"}, "no other request runs beside suspects"


def test_ranks_do_not_make_one_worker_several_that_could_be_on_trial() -> None:
    pool = ranked("v", "w~0", "w~1", "w~2")
    placed = suspects(pool, "ab", limit=1)
    assert len({worker_of(place) for place in placed.values()}) == 1


def test_a_worker_whose_ranks_are_all_that_is_left_serves_others_until_the_lost_one_is_back() -> None:
    pool = ranked("v", "w~0", "w~1")
    pool.scheduler.remove_worker("v", pool.now)
    assert suspects(pool, "a", limit=1) == {}
    pool.offer("r")
    assert "r" in pool.placed()
    pool.pass_time(WAIT_S)
    assert "a" in pool.placed()
