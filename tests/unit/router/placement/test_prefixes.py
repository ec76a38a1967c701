"""Where the prefix is: what it is worth, and who waits for its holder."""

from __future__ import annotations

from collections import Counter

from headrace.broker.codec import pack_u64
from headrace.router.placement.types import Placement
from tests.support.router.placement_pool import BLOCK, Pool, chain

LONG = chain(1, 40)


def test_a_prompt_goes_where_its_prefix_is() -> None:
    pool = Pool("abc")
    pool.holds("b", LONG)
    pool.offer("r", [*LONG, *chain(2, 3)])
    (decision,) = pool.decide()
    assert isinstance(decision, Placement)
    assert (decision.worker, decision.reason, decision.uncached) == ("b", "prefix", 3 * BLOCK)
    assert list(decision.new_blocks) == chain(2, 3)


def test_a_block_in_host_memory_saves_less_than_one_on_the_device_and_more_than_one_on_disk() -> None:
    for better, worse in (("device", "host"), ("host", "disk")):
        pool = Pool("ab")
        pool.holds("a", LONG, worse)
        pool.holds("b", LONG, better)
        pool.offer("r", LONG)
        assert pool.placed() == {"r": "b"}


def test_a_first_block_that_all_prompts_share_does_not_send_everything_to_one_worker() -> None:
    pool = Pool("abcd")
    found: Counter[str] = Counter()
    for n in range(400):
        pool.offer(f"r{n}", [7, *chain(n + 2, 20)])
        (decision,) = pool.decide()
        assert isinstance(decision, Placement)
        worker = decision.worker
        found[worker] += 1
        pool.holds(worker, decision.new_blocks)
        pool.event("started", f"r{n}", worker)
        pool.report(worker, running=1)
        pool.event("settled", f"r{n}", worker)
        pool.report(worker)
        pool.pass_time(1)
    assert max(found.values()) <= 1.1 * 400 / 4


def test_on_a_miss_the_least_loaded_by_tokens_is_chosen_not_the_one_with_fewest_requests() -> None:
    pool = Pool("ab", lookahead=1.0)
    pool.report("a", running=1, queued_prefill_tokens=6000)
    pool.report("b", running=5, queued_prefill_tokens=100)
    pool.offer("r", LONG)
    assert pool.placed() == {"r": "b"}


def test_a_burst_of_siblings_goes_to_one_worker_before_any_event_has_come() -> None:
    pool = Pool("abcd", lookahead=10.0)
    for n in range(3):
        pool.offer(f"r{n}", [*LONG, *chain(50 + n, 1)])
    assert len(set(pool.placed().values())) == 1


def test_what_another_router_places_attracts_siblings_too() -> None:
    pool = Pool("abcd", lookahead=10.0)
    pool.event("placed", "x", "c", tokens=40 * BLOCK, uncached=40 * BLOCK, blocks=40, by="r2", hashes=pack_u64(LONG))
    pool.offer("r", [*LONG, *chain(50, 1)])
    assert pool.placed() == {"r": "c"}


def test_a_prediction_that_nothing_confirms_is_forgotten_in_seconds() -> None:
    pool = Pool("ab")
    pool.view.predict("b", LONG, now_s=pool.now)
    pool.pass_time(10)
    pool.offer("r", LONG)
    (decision,) = pool.decide()
    assert isinstance(decision, Placement)
    assert decision.uncached == len(LONG) * BLOCK


def test_of_two_workers_with_room_the_one_that_disturbs_fewer_requests_is_chosen() -> None:
    pool = Pool("ab")
    pool.holds("a", LONG[:2])
    pool.report("a", running=1)
    pool.report("b", running=1)
    pool.offer("even", LONG)
    assert pool.placed() == {"even": "a"}, "two blocks of forty decide between equals"
    pool = Pool("ab")
    pool.holds("a", LONG[:2])
    pool.report("a", running=6)
    pool.report("b", running=1)
    pool.offer("r", LONG)
    assert pool.placed() == {"r": "b"}, "five more streams that would stand still are more than that"


def busy_holder(**settings: float) -> Pool:
    pool = Pool("ab", **settings)
    pool.holds("a", LONG)
    pool.report("a", running=1, queued_prefill_tokens=8_000)
    return pool


def test_a_request_waits_for_the_busy_holder_of_its_prefix_when_that_starts_it_sooner() -> None:
    pool = busy_holder()
    pool.offer("r", [*LONG, *chain(2, 1)])
    assert pool.placed() == {}, "20,480 tokens elsewhere take longer than 8,000 here and one block"
    pool.pass_time(0.3)
    assert pool.placed() == {"r": "a"}


def test_it_does_not_wait_when_another_worker_is_sooner() -> None:
    pool = busy_holder()
    pool.offer("r", [*LONG[:4], *chain(2, 4)])
    assert pool.placed() == {"r": "b"}


def test_nobody_waits_for_a_cache_for_ever() -> None:
    pool = busy_holder(max_wait_s=5.0)
    pool.offer("r", [*LONG, *chain(2, 1)])
    for _ in range(20):
        pool.report("a", running=1, queued_prefill_tokens=8_000)  # never gets done
        assert pool.placed() == {}
        pool.pass_time(0.25)
    pool.report("a", running=1, queued_prefill_tokens=8_000)
    pool.pass_time(0.1)
    assert pool.placed() == {"r": "b"}


def test_short_work_goes_first_but_waiting_outweighs_length_in_the_end() -> None:
    pool = Pool("a", max_wait_s=30.0)
    pool.report("a", running=8)
    pool.offer("long", tokens=100_000)
    pool.offer("short", tokens=100)
    pool.report("a", running=7)
    assert list(pool.placed()) == ["short"]
    pool.report("a", running=8)
    pool.pass_time(31)
    pool.offer("short again", tokens=100)
    pool.report("a", running=7)
    assert list(pool.placed()) == ["long"]
