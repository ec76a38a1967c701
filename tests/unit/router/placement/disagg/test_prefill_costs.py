"""When the way to a prefill worker pays, and what it does to placement."""

from __future__ import annotations

import pytest

from headrace.broker.codec import pack_u64
from headrace.router.placement.disagg_planner import announced
from tests.support.router.disagg_pool import LONG, apart, elsewhere, where
from tests.support.router.placement_pool import BLOCK, Pool, chain


def test_a_long_prompt_beside_running_sequences_is_computed_elsewhere_and_a_short_one_is_not() -> None:
    pool = apart()
    pool.offer("long", LONG)
    placement = pool.placement()
    assert where(placement) == (True, "pays")
    assert announced(placement) == "*"
    pool.offer("short", tokens=100)
    assert where(pool.placement()) == (False, "short")


def test_what_the_decode_worker_has_cached_need_not_go_anywhere() -> None:
    pool = apart()
    pool.holds("a", LONG)
    pool.offer("r", [*LONG, 7], tokens=len(LONG) * BLOCK + 100)
    placement = pool.placement()
    assert where(placement) == (False, "cached")
    assert placement.uncached == 100


def test_never_and_always_ask_nobody_what_it_costs() -> None:
    pool = apart(prefill="never")
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, "never")
    pool = apart(prefill="always")
    pool.offer("r", tokens=1)
    assert where(pool.placement()) == (True, "always")


def test_a_slow_way_there_makes_it_not_worth_going() -> None:
    pool = apart(prefill_disturbance=0.0, prefill_late=0.0, lookahead=1.0)
    assert _goes_away(pool, 1)
    for n in range(40):
        pool.report("a", running=4, handover_s=3.0 + n / 1000, handover_tokens=8192)
    assert not _goes_away(pool, 2)


def _goes_away(pool: Pool, number: int) -> bool:
    """Whether a long prompt does, when it would have to wait a little where it is answered."""
    pool.report("a", running=4, queued_prefill_tokens=3000)
    pool.offer(f"r{number}", chain(number, 16))
    placement = pool.placement()
    pool.event("prefilled", placement.request.id, placement.worker)
    pool.pass_time(10.0)
    return placement.remote


def test_the_more_sequences_would_be_kept_waiting_the_rather_it_goes_away() -> None:
    for running, remote in ((0, False), (6, True)):
        pool = apart(prefill_late=0.0)
        pool.report("a", running=running)
        elsewhere(pool, "x", 2000)  # 83 ms before it
        pool.offer("r", LONG)
        assert pool.placement().remote is remote, running


def test_steps_beyond_the_wanted_time_between_tokens_count_more() -> None:
    for itl_s, remote in ((10.0, False), (0.02, True)):
        pool = apart(prefill_itl_s=itl_s, prefill_disturbance=0.0)
        elsewhere(pool, "x", 2000)
        pool.offer("r", chain(3, 4))
        assert pool.placement().remote is remote, itl_s


def test_a_prefix_that_a_prefill_worker_has_is_worth_naming_it() -> None:
    pool = apart("a", "pqs")
    pool.holds("q", LONG)
    pool.offer("r", [*LONG, *chain(2, 4)])
    placement = pool.placement()
    assert placement.prefill is not None
    assert (placement.prefill.worker, placement.prefill.reason) == ("q", "prefix_there")
    assert announced(placement) == "q"


def test_a_prefix_is_not_worth_waiting_longer_for_than_computing_takes() -> None:
    pool = apart("a", "pqs")
    pool.holds("q", LONG)
    elsewhere(pool, "x", 100_000, prefill="q")
    pool.offer("r", [*LONG, *chain(2, 4)])
    placement = pool.placement()
    assert placement.prefill is not None
    assert (placement.prefill.worker, placement.prefill.reason) == ("", "pays")


def test_a_prefix_is_worth_waiting_for_a_little() -> None:
    pool = apart("a", "pqs")
    pool.holds("q", LONG)
    elsewhere(pool, "x", 4800, prefill="q")  # 0.2 s; without it 0.43 s
    pool.offer("r", [*LONG, *chain(2, 4)])
    assert pool.decide() == []
    pool.pass_time(0.15)
    assert pool.placement().prefill is not None


def test_blocks_that_are_computed_elsewhere_are_not_cached_before_they_are_there() -> None:
    pool = apart()
    pool.offer("r1", LONG)
    assert pool.placement().remote
    pool.event("prefilled", "r1", "a")
    pool.offer("r2", LONG)
    placement = pool.placement()
    assert (placement.remote, placement.uncached) == (True, len(LONG) * BLOCK)
    pool.event("prefilled", "r2", "a")
    pool.holds("a", LONG)
    pool.offer("r3", LONG)
    assert where(pool.placement()) == (False, "cached")


@pytest.mark.parametrize("by", ["own", "other"])
def test_siblings_follow_each_other_to_the_prefill_worker_that_computes_their_prefix(by: str) -> None:
    pool = apart("a", "pqs", prefill_lookahead_s=100.0)
    if by == "own":
        pool.holds("q", LONG[:8])
        pool.offer("r1", LONG)
        assert announced(pool.placement()) == "q"
    else:
        hashes = pack_u64(LONG)
        pool.event("placed", "x", "a", tokens=8192, uncached=8192, blocks=16, by="r2", hashes=hashes, prefill="q")
    pool.offer("r2", [*LONG, *chain(2, 30)])
    assert pool.placement().remote
    assert pool.view.verify("q", LONG).device == len(LONG)
    assert pool.view.verify("a", LONG).device == 0


def test_a_decode_worker_without_cache_events_is_taken_to_hold_what_was_placed_on_it() -> None:
    pool = Pool("")
    pool.apart(decode="a", kv_events=False)
    pool.apart(prefill="p")
    pool.report("a", running=4)
    pool.offer("r1", LONG)
    assert pool.placement().remote
    pool.offer("r2", LONG)
    assert where(pool.placement()) == (False, "cached")


def test_prompts_that_wait_for_the_same_step_count_together() -> None:
    """Each alone would fit into a step that is short enough."""
    remote = []
    for before in (0, 400):
        pool = apart(prefill_itl_s=0.04, lookahead=0.5)
        elsewhere(pool, "x", 2300)
        pool.report("a", running=4, queued_prefill_tokens=before)
        pool.pass_time(0.02)  # the step that runs may have begun before them
        pool.offer("r", tokens=500)
        remote.append(pool.placement().remote)
    assert remote == [False, True]
