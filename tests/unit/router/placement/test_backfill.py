"""Batch requests fill what interactive ones leave on the workers, and never stand in their way."""

from __future__ import annotations

from headrace.router.placement.types import Placement
from tests.support.router.placement_pool import BLOCK, Pool, chain


def batch(pool: Pool, request_id: str, blocks: int = 0, **fields: object) -> None:
    pool.offer(request_id, chain(int(request_id.strip("b") or 0) + 1, blocks), request_class="batch", **fields)


def test_a_batch_request_is_placed_on_an_idle_worker_and_can_be_preempted() -> None:
    pool = Pool("a")
    batch(pool, "b1", tokens=10)
    placement = pool.placement()
    assert (placement.request.id, placement.kept) == ("b1", False)


def test_batch_requests_leave_some_slots_free() -> None:
    pool = Pool("a", batch_reserve=0.25)
    pool.report("a", running=6)
    batch(pool, "b1", tokens=10)
    assert pool.placed() == {}
    pool.report("a", running=5)
    assert pool.placed() == {"b1": "a"}


def test_a_batch_request_waits_until_the_worker_has_computed_the_prompts_before_it() -> None:
    pool = Pool("a")
    pool.report("a", running=1, queued_prefill_tokens=400)
    batch(pool, "b1", tokens=10)
    assert pool.placed() == {}
    pool.offer("s", tokens=10)
    assert pool.placed() == {"s": "a"}, "an interactive request need not wait for that"
    pool.report("a", running=2)
    assert pool.placed() == {"b1": "a"}


def test_prompts_of_batch_requests_come_one_after_the_other_beside_interactive_work() -> None:
    pool = Pool("a")
    pool.report("a", running=1)
    for number in range(1, 4):
        batch(pool, f"b{number}", 2)
    assert len(pool.placed()) == 1
    pool.event("started", "b1", "a")
    pool.report("a", running=1)
    assert len(pool.placed()) == 1


def test_in_a_pool_without_interactive_work_prompts_of_batch_requests_are_computed_together() -> None:
    pool = Pool("a")
    pool.report("a", running=1, batch=1)
    for number in range(1, 4):
        batch(pool, f"b{number}", tokens=250)
    assert len(pool.placed()) == 3


def test_a_pool_has_no_interactive_work_once_none_was_seen_for_some_seconds() -> None:
    pool = Pool("a", batch_quiet_s=5.0)
    pool.offer("s", tokens=10)
    assert pool.placed() == {"s": "a"}
    pool.event("settled", "s", "a")
    pool.report("a", running=0)
    for number in range(1, 4):
        batch(pool, f"b{number}", tokens=250)
    assert len(pool.placed()) == 1, "the next interactive request may be due"
    pool.now += 5.0
    pool.report("a", running=1, batch=1)
    assert len(pool.placed()) == 2


def test_interactive_requests_are_placed_on_workers_full_of_batch_runs() -> None:
    pool = Pool("a")
    pool.report("a", running=8, yielding=2)
    for request_id in "stu":
        pool.offer(request_id, tokens=10)
    assert pool.placed() == {"s": "a", "t": "a"}


def test_a_batch_request_on_its_way_keeps_no_interactive_one_out() -> None:
    pool = Pool("a", batch_reserve=0.0)
    pool.report("a", running=7)
    batch(pool, "b1", tokens=10)
    assert pool.placed() == {"b1": "a"}
    pool.offer("s", tokens=10)
    assert pool.placed() == {"s": "a"}


def test_blocks_of_batch_runs_count_as_free_for_interactive_requests_only() -> None:
    pool = Pool("a", batch_reserve=0.0)
    pool.report("a", running=1, blocks_total=100, blocks_used=99, yielding=1, yielding_blocks=50)
    batch(pool, "b1", 4)
    assert pool.placed() == {}
    pool.offer("s", chain(9, 4))
    assert pool.placed() == {"s": "a"}


def test_batch_requests_leave_some_blocks_free() -> None:
    pool = Pool("", batch_reserve=0.1)
    pool.join("a", blocks=100)
    pool.report("a", running=1, blocks_total=100, blocks_used=88)
    batch(pool, "b1", 4)
    assert pool.placed() == {}
    pool.report("a", running=1, blocks_total=100, blocks_used=80)
    assert pool.placed() == {"b1": "a"}


def test_no_batch_request_goes_before_an_interactive_one_that_waits() -> None:
    pool = Pool("ab")
    pool.report("b", running=8)
    pool.offer("s", tokens=10, worker="b")
    batch(pool, "b1", tokens=10)
    assert pool.placed() == {}
    pool.report("b", running=7)
    assert pool.placed() == {"s": "b", "b1": "a"}


def test_in_a_pool_that_is_always_full_a_batch_request_is_kept_where_it_is_placed() -> None:
    pool = Pool("a")
    pool.report("a", running=8)
    batch(pool, "b1", tokens=10)
    pool.offer("s", tokens=10)
    pool.report("a", running=7)
    pool.offer("t", tokens=10)
    assert pool.placed() == {"s": "a"}
    pool.event("started", "s", "a")
    pool.report("a", running=8)
    assert pool.placed() == {}
    pool.pass_time(1.5)
    pool.report("a", running=7)
    placement = pool.placement()
    assert (placement.request.id, placement.kept) == ("b1", True)
    pool.event("started", "b1", "a")
    pool.report("a", running=8)
    assert pool.placed() == {}


def test_waiting_batch_requests_do_not_make_interactive_ones_wait_for_a_cache() -> None:
    """Many that wait make a cached prefix worth a wait; batch requests are not delayed by prefill that could be saved."""
    pool = Pool("ab", balance=0.0)
    shared = chain(77, 4)
    pool.holds("a", shared)
    pool.report("a", running=8)
    pool.event("started", "x", "a")
    pool.pass_time(10.0)
    pool.event("settled", "x", "a")  # so the next slot of this worker is free in a second or more
    pool.report("b")
    for number in range(1, 200):
        batch(pool, f"b{number}", tokens=BLOCK)
    pool.offer("s", shared)
    assert pool.placed() == {"s": "b"}


def test_a_flood_of_batch_requests_refuses_nothing() -> None:
    pool = Pool("a")
    assert all(
        pool.offer(f"b{number}", tokens=BLOCK, request_class="batch", deadline_s=pool.now + 1.0) is None
        for number in range(3000)
    )
    assert pool.offer("s", tokens=10) is None


def test_beside_interactive_work_a_prefill_worker_gets_one_batch_prompt_and_interactive_ones_behind_it() -> None:
    pool = Pool("", prefill="always")
    pool.apart(decode="d", prefill="p")
    pool.report("d", running=1)
    for number in range(1, 4):
        batch(pool, f"b{number}", tokens=1000)
    (first,) = (one for one in pool.decide() if isinstance(one, Placement))
    assert first.remote
    pool.offer("s", tokens=1000)
    (second,) = (one for one in pool.decide() if isinstance(one, Placement))
    assert (second.request.id, second.remote) == ("s", True), "batch prompts have left room in the prefill queue"


def test_in_a_pool_without_interactive_work_prefill_workers_get_batch_prompts_as_any_others() -> None:
    pool = Pool("", prefill="always")
    pool.apart(decode="d", prefill="p")
    for number in range(1, 4):
        batch(pool, f"b{number}", tokens=1000)
    assert len(pool.placed()) == 3


def test_a_batch_request_whose_prompt_is_computed_elsewhere_takes_no_reserved_slot() -> None:
    pool = Pool("", prefill="always", batch_reserve=0.25)
    pool.apart(decode="d", prefill="p")
    pool.report("d", running=6, batch=6, yielding=6)
    batch(pool, "b1", tokens=1000)
    assert pool.placed() == {}
    pool.offer("s", tokens=1000)
    assert pool.placed() == {"s": "d"}
