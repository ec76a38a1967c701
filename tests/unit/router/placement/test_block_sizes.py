"""Fleets whose engines have blocks of different sizes: what is cached and free is counted in blocks of the pool."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.router.index.types import Overlap
from headrace.router.placement.types import WorkerInfo
from tests.support.router.placement_pool import BLOCK, Pool, chain

PROMPT = chain(1, 20)


def mixed() -> Pool:
    """A cheap worker with blocks as long as the pool's, and a dear one whose blocks have eight of them."""
    pool = Pool("")
    pool.join("a", fleet="cheap", price=1.0)
    pool.join("b", fleet="dear", price=4.0, pool_blocks=8, blocks=80)
    pool.report("a")
    pool.report("b")
    return pool


def uncached(pool: Pool, held: int) -> int:
    pool.holds("b", PROMPT[:held])
    pool.offer("r", PROMPT, worker="b")
    return pool.placement().uncached


def test_a_part_of_a_block_that_an_engine_holds_is_computed_again() -> None:
    assert uncached(mixed(), 16) == 4 * BLOCK
    assert uncached(mixed(), 15) == 12 * BLOCK
    assert uncached(mixed(), 7) == 20 * BLOCK


def test_a_prefix_counts_in_tokens_whatever_the_blocks_of_its_fleet() -> None:
    for fleet_of_prefix, held in (("a", 16), ("b", 16)):
        pool = mixed()
        pool.holds(fleet_of_prefix, PROMPT[:held])
        pool.offer("r", PROMPT, ttft_target_s=0.2)  # all of the prompt takes 0.43 s, a fifth of it 0.09 s
        placement = pool.placement()
        assert (placement.worker, placement.uncached) == (fleet_of_prefix, 4 * BLOCK)


def test_free_blocks_of_an_engine_are_as_many_of_the_pools_as_they_have_tokens() -> None:
    pool = mixed()
    pool.report("b", running=1, blocks_total=10, blocks_used=8)
    load = next(load for load in pool.scheduler.pool.loads if load.info.worker == "b")
    assert load.blocks_free() == 16
    pool.offer("r", chain(2, 16), worker="b")
    pool.offer("s", chain(3, 17), worker="b")
    assert pool.placed() == {"r": "b"}


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_what_is_of_use_is_whole_blocks_and_never_more_than_there_is(device: int, host: int, disk: int, each: int) -> None:
    found = Overlap(device, host, disk)
    whole = WorkerInfo(worker="w", slots=1, pool_blocks=each).whole(found)
    assert min(whole) >= 0
    assert whole.blocks % each == 0
    assert found.blocks - each < whole.blocks <= found.blocks
    assert whole.device % each == 0
    assert whole.device <= device
    assert whole.device + whole.host <= device + host
