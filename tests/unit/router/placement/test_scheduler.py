"""The scheduler: late binding, the load it knows of, order, ends, and what is said about it."""

from __future__ import annotations

from headrace.router.placement.settings import FairnessSettings
from headrace.router.placement.types import Placement, Shed
from tests.support.router.placement_pool import BLOCK, Pool, chain
from tests.unit.router.placement.test_prefixes import busy_holder

LONG = chain(1, 40)


def test_a_worker_gets_no_more_than_it_has_slots_for() -> None:
    pool = Pool("a")
    for n in range(12):
        pool.offer(f"r{n}", tokens=10)
    assert len(pool.placed()) == 8
    pool.report("a", running=8)
    assert pool.placed() == {}, "its own report says that it is full"
    pool.pass_time(6)
    pool.report("a", running=6)
    assert len(pool.placed()) == 2


def test_a_worker_with_prefill_before_it_gets_nothing_until_that_is_nearly_done() -> None:
    pool = Pool("a")
    pool.report("a", running=1, queued_prefill_tokens=12_000)
    pool.offer("r", LONG)
    assert pool.placed() == {}
    wake_s = pool.scheduler.next_wake_s(pool.now)
    assert wake_s is not None
    assert wake_s > pool.now
    pool.pass_time(0.47)  # 24,000 tokens/s: 11,280 are done
    assert pool.placed() == {"r": "a"}


def test_kv_memory_that_is_not_there_holds_a_request_back_unless_the_worker_is_empty() -> None:
    pool = Pool("a")
    pool.report("a", running=3, blocks_total=100, blocks_used=80)
    pool.offer("r", LONG)
    assert pool.placed() == {}
    pool.report("a", running=2, blocks_total=100, blocks_used=20)
    assert pool.placed() == {"r": "a"}
    pool = Pool("a")
    pool.report("a", running=0, blocks_total=10, blocks_used=0)
    pool.offer("larger-than-all", LONG)
    assert pool.placed() == {"larger-than-all": "a"}, "the engine says what is impossible, not the router"


def test_slots_that_are_free_before_a_placement_arrives_are_room_already() -> None:
    pool = Pool("a", lookahead_s=0.02)
    for n in range(8):
        pool.offer(f"r{n}", tokens=1)
    pool.placed()
    for n in range(8):
        pool.event("started", f"r{n}", "a")
    pool.report("a", running=8)
    pool.offer("next", tokens=1)
    assert pool.placed() == {}, "nobody knows yet how long requests take"
    pool.pass_time(0.04)
    pool.event("settled", "r0", "a")  # eight slots, 40 ms each: four are free in 20 ms
    pool.report("a", running=8)
    assert pool.placed() == {"next": "a"}


def test_early_binding_waits_for_nothing() -> None:
    pool = Pool("a", binding="early")
    for n in range(20):
        pool.offer(f"r{n}", tokens=10_000)
    assert len(pool.placed()) == 20


def test_the_load_of_a_lost_request_expires_in_seconds() -> None:
    pool = Pool("a")
    for n in range(8):
        pool.event("placed", f"lost{n}", "a", tokens=50_000, uncached=50_000, by="r2")
    pool.offer("r", tokens=10)
    assert pool.placed() == {}
    pool.pass_time(5.5)
    assert pool.placed() == {"r": "a"}


def announced(pool: Pool, name: str) -> None:
    pool.event("placed", name, "a", tokens=1, uncached=1, by="r2")


def test_a_request_that_ended_before_another_router_announces_it_takes_no_slot() -> None:
    pool = Pool("a")
    for n in range(20):
        pool.event("started", f"quick{n}", "a")
        pool.event("settled", f"quick{n}", "a")
        announced(pool, f"quick{n}")
    pool.offer("r", tokens=10)
    assert pool.placed() == {"r": "a"}


def test_a_request_that_started_before_another_router_announces_it_counts_until_the_next_report() -> None:
    pool = Pool("a")
    for n in range(8):
        pool.event("started", f"early{n}", "a")
        announced(pool, f"early{n}")
    pool.offer("r", tokens=10)
    assert pool.placed() == {}, "they run"
    pool.report("a", running=7)
    assert pool.placed() == {"r": "a"}, "the report has them, and counts them once"


def test_an_earlier_attempt_that_ended_says_nothing_of_the_next_one() -> None:
    pool = Pool("a")
    for n in range(8):
        pool.event("moved", f"r{n}", "a")
        pool.event("placed", f"r{n}", "a", attempt=2, tokens=1, uncached=1, by="r2")
    pool.offer("r", tokens=10)
    assert pool.placed() == {}


def test_a_worker_whose_queue_was_full_recovers_with_its_next_report() -> None:
    pool = Pool("a")
    pool.offer("r", tokens=10)
    (decision,) = pool.decide()
    assert isinstance(decision, Placement)
    pool.scheduler.unplace(decision, pool.now)
    assert pool.scheduler.waiting == 1
    assert pool.placed() == {}
    pool.report("a")
    assert pool.placed() == {"r": "a"}


def test_a_worker_that_leaves_is_forgotten_and_one_that_drains_gets_nothing() -> None:
    pool = Pool("ab")
    pool.holds("a", LONG)
    pool.scheduler.remove_worker("a", pool.now)
    pool.offer("r", LONG)
    assert pool.placed() == {"r": "b"}
    pool.join("b", draining=True)
    pool.offer("s", LONG)
    assert pool.placed() == {}
    pool.join("c")
    assert pool.placed() == {"s": "c"}


def test_moved_work_is_first_then_the_better_class() -> None:
    pool = Pool("a")
    pool.report("a", running=8)
    pool.offer("std", tokens=10)
    pool.offer("hi", tokens=10, request_class="hi")
    pool.offer("re", tokens=90_000, request_class="re", attempt=2)
    order = []
    for _ in range(3):
        pool.report("a", running=7)
        order += pool.placed()
        pool.pass_time(6)
    assert order == ["re", "hi", "std"]


def test_a_lower_priority_number_is_sooner_inside_a_class() -> None:
    pool = Pool("a")
    pool.report("a", running=8)
    pool.offer("later", tokens=10, priority=5)
    pool.offer("sooner", tokens=4000, priority=-5)
    pool.report("a", running=7)
    assert list(pool.placed()) == ["sooner"]


def test_a_request_whose_deadline_passes_in_the_window_is_ended() -> None:
    pool = Pool("a")
    pool.report("a", running=8)
    pool.offer("r", tokens=10, deadline_s=pool.now + 1)
    pool.pass_time(1.5)
    (decision,) = pool.decide()
    assert isinstance(decision, Shed)
    assert decision.code == "deadline"
    assert pool.scheduler.waiting == 0


def test_one_tenant_may_fill_the_window_only_while_it_is_alone() -> None:
    pool = Pool("a")
    pool.report("a", running=8)
    shed = [pool.offer(f"r{n}", tokens=1, tenant="t") for n in range(2000)]
    assert not any(shed), "nobody is protected by refusing these"
    pool.offer("other", tokens=1, tenant="u")
    refused = pool.offer("one more", tokens=1, tenant="t")
    assert isinstance(refused, Shed)
    assert refused.code == "tenant_limit"


def test_a_tenant_that_is_alone_is_told_all_the_same_that_its_deadline_is_hopeless() -> None:
    pool = Pool("a")
    pool.report("a", running=8)
    for n in range(1500):
        pool.offer(f"r{n}", tokens=24_000, tenant="t")
    refused = pool.offer("hurried", tokens=10, tenant="t", deadline_s=pool.now + 5)
    assert isinstance(refused, Shed)
    assert refused.code == "deadline_hopeless"


def test_a_tenant_over_its_share_does_not_get_a_worker_that_another_leaves_for_the_sake_of_its_cache() -> None:
    pool = Pool("ab", fairness=FairnessSettings(slack_tokens=1000.0))
    pool.holds("a", LONG)
    pool.offer("first", chain(5, 10), tenant="greedy")
    pool.offer("other", chain(7, 1), tenant="modest")
    pool.placed()
    for worker in "ab":
        pool.event("started", "first", worker)
        pool.event("started", "other", worker)
    pool.report("a", running=1, queued_prefill_tokens=8_000)
    pool.report("b")
    pool.offer("modest", LONG, tenant="modest")
    pool.offer("greedy", chain(6, 10), tenant="greedy")
    assert pool.placed() == {}, "b stays free for a moment"
    pool.scheduler.cancel(["modest"])
    assert pool.placed() == {"greedy": "b"}


def test_cancelled_requests_leave_the_window() -> None:
    pool = Pool("a")
    pool.report("a", running=8)
    pool.offer("r", tokens=1)
    pool.offer("s", tokens=1)
    assert [one.id for one in pool.scheduler.cancel(["r", "unknown"])] == ["r"]
    pool.report("a")
    assert pool.placed() == {"s": "a"}


def test_routers_take_turns_at_a_worker_that_has_just_got_room_and_short_work_goes_first() -> None:
    pools = {name: Pool("a", name=name) for name in ("r1", "r2")}
    for name, pool in pools.items():
        pool.scheduler.set_routers(["r1", "r2"])
        pool.report("a", running=8)
        pool.offer(name, tokens=24_000 if name == "r1" else 100)
        assert pool.placed() == {}
        pool.report("a", running=7)
    waits = dict.fromkeys(pools, 0.0)
    for name, pool in pools.items():
        while not (placed := pool.placed()):
            wake_s = pool.scheduler.next_wake_s(pool.now)
            assert wake_s is not None
            waits[name] += wake_s - pool.now
            pool.now = wake_s
        assert placed == {name: "a"}
    assert waits["r2"] < waits["r1"] < 0.1


def test_every_decision_explains_itself() -> None:
    pool = Pool("ab")
    pool.join("c", draining=True)
    pool.holds("b", LONG)
    pool.offer("r", [*LONG, *chain(2, 2)])
    pool.placed()
    told = pool.scheduler.explain("r", pool.now)
    assert told is not None
    assert (told.state, told.worker, told.reason, told.policy) == ("placed", "b", "prefix", "kv")
    by_name = {one.worker: one for one in told.candidates}
    assert (by_name["b"].device, by_name["b"].uncached) == (40, 2 * BLOCK)
    assert by_name["a"].cost_s > by_name["b"].cost_s
    assert by_name["c"].why_not == "draining"
    assert pool.scheduler.explain("unknown", pool.now) is None


def test_a_request_that_moved_is_explained_with_both_placements_and_its_wait_in_the_window() -> None:
    pool = Pool("ab")
    pool.offer("r", chain(1, 2), name="mine")
    pool.placed()
    arrived_s, first = pool.now, pool.scheduler.explain("r", pool.now)
    pool.now += 7.0
    pool.offer("r", chain(1, 2), name="mine", attempt=2, arrived_s=arrived_s, entered_s=pool.now)
    pool.placed()
    told = pool.scheduler.explain("r", pool.now)
    assert first is not None
    assert told is not None
    assert (told.attempt, told.waited_s, told.since_arrival_s) == (2, 0.0, 7.0)
    assert told.predicted_ttft_s > 7.0
    (earlier,) = told.earlier
    assert (earlier.attempt, earlier.worker, earlier.at) == (1, first.worker, arrived_s)
    assert earlier.candidates == first.candidates


def test_requests_are_explained_by_their_client_s_id_while_they_wait_and_afterwards() -> None:
    pool = busy_holder()
    pool.offer("waits", [*LONG, *chain(2, 1)], name="mine")
    pool.offer("other", chain(3, 1), name="yours")
    pool.placed()
    waiting = pool.scheduler.explain("mine", pool.now)
    assert waiting is not None
    assert (waiting.id, waiting.name, waiting.state) == ("waits", "mine", "waiting")
    placed = pool.scheduler.explain("yours", pool.now)
    assert placed is not None
    assert (placed.id, placed.state) == ("other", "placed")
    assert pool.scheduler.explain("nobodys", pool.now) is None


def test_one_that_waits_is_explained_as_it_stands() -> None:
    pool = busy_holder()
    pool.offer("r", [*LONG, *chain(2, 1)])
    pool.placed()
    told = pool.scheduler.explain("r", pool.now)
    assert told is not None
    assert told.state == "waiting"
    assert {one.worker: one.room for one in told.candidates} == {"a": False, "b": True}


def test_a_worker_of_unknown_speed_counts_as_slow_as_the_known_one_that_has_the_prompt_in_its_cache() -> None:
    pool = Pool("ab")
    pool.report("b")
    for n in range(20):
        pool.report("a", step_s=0.06 + n * 1e-5, step_decodes=1)
    pool.holds("a", LONG[:30])
    pool.offer("r", LONG)
    assert pool.placed() == {"r": "a"}
