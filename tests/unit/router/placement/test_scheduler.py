"""The scheduler: late binding, where the prefix is, who waits for what, and the traps that sank others."""

from __future__ import annotations

from collections import Counter

import pytest

from broker.codec import pack_u64
from router.errors import SettingsInvalid
from router.placement.fair_settings import FairnessSettings
from router.placement.settings import SchedulerSettings
from router.placement.types import Placement, Shed
from tests.unit.router.placement.pool import BLOCK, Pool, chain

LONG = chain(1, 40)


# -- late binding ----------------------------------------------------------------------------------------------------------


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


# -- where the prefix is ---------------------------------------------------------------------------------------------------


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


# -- waiting for the holder ------------------------------------------------------------------------------------------------


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


# -- load ------------------------------------------------------------------------------------------------------------------


def test_the_load_of_a_lost_request_expires_in_seconds() -> None:
    pool = Pool("a")
    for n in range(8):
        pool.event("placed", f"lost{n}", "a", tokens=50_000, uncached=50_000, by="r2")
    pool.offer("r", tokens=10)
    assert pool.placed() == {}
    pool.pass_time(5.5)
    assert pool.placed() == {"r": "a"}


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


# -- who may take it -------------------------------------------------------------------------------------------------------


def test_a_named_worker_gets_it_even_when_others_are_better() -> None:
    pool = Pool("ab")
    pool.holds("a", LONG)
    pool.offer("r", LONG, worker="b")
    (decision,) = pool.decide()
    assert isinstance(decision, Placement)
    assert (decision.worker, decision.reason) == ("b", "direct")


def test_required_labels_and_adapters_are_a_must_and_preferred_labels_weigh() -> None:
    pool = Pool("")
    pool.join("a", labels=frozenset({"zone-1", "big"}))
    pool.join("b", labels=frozenset({"zone-2"}), adapters=frozenset({"sql"}))
    pool.offer("must", chain(1, 1), require=frozenset({"zone-2"}))
    pool.offer("lora", chain(2, 1), adapter="sql")
    assert pool.placed() == {"must": "b", "lora": "b"}
    pool.report("b")
    pool = Pool("")
    pool.join("a", labels=frozenset({"zone-1"}))
    pool.join("b", labels=frozenset({"zone-2"}))
    pool.offer("likes", LONG, prefer={"zone-2": 1.0})
    assert pool.placed() == {"likes": "b"}
    pool.report("a")
    pool.offer("avoids", chain(3, 40), prefer={"zone-2": -2.0})
    assert pool.placed() == {"avoids": "a"}


def test_adapters_that_come_and_go_are_followed() -> None:
    pool = Pool("ab")
    pool.holds("a", LONG)
    pool.offer("early", LONG, adapter="sql")
    assert pool.placed() == {}
    pool.join("b", adapters=frozenset({"sql"}))
    assert pool.placed() == {"early": "b"}, "it waited for an adapter that is there now"
    pool.report("b")
    pool.join("a", adapters=frozenset({"sql"}))
    pool.join("b")
    pool.offer("late", LONG, adapter="sql")
    assert pool.placed() == {"late": "a"}


def test_what_nobody_may_take_is_refused_after_a_while_with_the_reason() -> None:
    pool = Pool("ab", no_worker_s=3.0)
    pool.offer("r", worker="gone", tokens=5)
    assert pool.decide() == []
    pool.pass_time(3.1)
    (decision,) = pool.decide()
    assert isinstance(decision, Shed)
    assert decision.code == "no_eligible_worker"
    assert "'gone'" in decision.message
    assert decision.retry_after_s


def test_a_session_stays_with_its_worker() -> None:
    homes: Counter[str] = Counter()
    for n in range(40):
        pool = Pool("abcd")
        pool.offer("1", chain(1, 4), session=f"s{n}", affinity="hard")
        first = pool.placed()["1"]
        homes[first] += 1
        pool.event("started", "1", first)
        pool.report(first)
        pool.offer("2", chain(2, 4), session=f"s{n}", affinity="hard")
        assert pool.placed() == {"2": first}
    assert len(homes) == 4, "sessions are spread"


@pytest.mark.parametrize(("affinity", "stays"), [("soft", False), ("hard", True)])
def test_a_soft_session_leaves_its_worker_when_that_costs_much_more_and_a_hard_one_does_not(affinity: str, stays: bool) -> None:
    pool = Pool("ab")
    pool.offer("1", chain(1, 1), session="s")
    home = pool.placed()["1"]
    pool.event("started", "1", home)
    pool.report(home)
    other = "a" if home == "b" else "b"
    pool.holds(other, LONG)
    pool.offer("2", LONG, session="s", affinity=affinity)
    assert pool.placed() == {"2": home if stays else other}


def test_a_soft_session_stays_with_its_worker_while_that_costs_little_more() -> None:
    for n in range(8):
        pool = Pool("ab")
        pool.offer("1", chain(1, 1), session=f"s{n}")
        home = pool.placed()["1"]
        pool.event("started", "1", home)
        pool.report(home, queued_prefill_tokens=400)
        pool.offer("2", chain(2, 8), session=f"s{n}")
        (decision,) = pool.decide()
        assert isinstance(decision, Placement)
        assert (decision.worker, decision.reason) == (home, "session")


def test_a_busy_worker_keeps_its_hard_sessions_waiting() -> None:
    pool = Pool("ab")
    pool.offer("1", chain(1, 1), session="s", affinity="hard")
    home = pool.placed()["1"]
    pool.report(home, running=8)
    pool.offer("2", chain(2, 1), session="s", affinity="hard")
    assert pool.placed() == {}


# -- policies --------------------------------------------------------------------------------------------------------------


def spread(policy: str, count: int = 40) -> list[str]:
    pool = Pool("abcd", policy=policy, lookahead=1000.0)
    pool.holds("a", LONG)
    workers = []
    for n in range(count):
        pool.offer(f"r{n}", LONG)
        workers.append(pool.placed()[f"r{n}"])
        for worker in "abcd":
            pool.event("started", f"r{n}", worker)
            pool.report(worker)
    return workers


def test_least_loaded_goes_by_tokens_not_by_requests() -> None:
    pool = Pool("ab", policy="least-loaded", lookahead=1.0)
    pool.report("a", running=1, queued_prefill_tokens=6000)
    pool.report("b", running=5, queued_prefill_tokens=100)
    pool.offer("r", LONG)
    assert pool.placed() == {"r": "b"}


def test_round_robin_goes_round() -> None:
    assert spread("round-robin", 8) == list("abcdabcd")


@pytest.mark.parametrize("policy", ["random", "power-of-two", "least-loaded"])
def test_policies_without_a_cache_use_all_workers(policy: str) -> None:
    assert set(spread(policy)) == set("abcd")


def test_kv_uses_the_cache_where_they_do_not() -> None:
    assert Counter(spread("kv", 8)).most_common(1)[0][0] == "a"


def test_a_temperature_spreads_what_would_all_go_to_the_cheapest() -> None:
    pool = Pool("abcd", temperature=2.0, lookahead=1000.0, balance=0.0)
    workers = set()
    for n in range(60):
        pool.report("a", queued_prefill_tokens=2000)
        for worker in "bcd":
            pool.report(worker, queued_prefill_tokens=2500)
        pool.offer(f"r{n}", tokens=100)
        workers.add(pool.placed()[f"r{n}"])
        pool.pass_time(6)
    assert workers == set("abcd")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("policy", "best"), ("binding", "maybe"), ("lookahead", 0.0), ("tiers", {"tape": 0.5}), ("temperature", -1.0)],
)
def test_settings_that_cannot_be_are_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(SettingsInvalid, match=setting):
        SchedulerSettings(**{setting: value})


# -- order, limits, ends ---------------------------------------------------------------------------------------------------


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


# -- several routers -------------------------------------------------------------------------------------------------------


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


# -- explanations ----------------------------------------------------------------------------------------------------------


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


def test_one_that_waits_is_explained_as_it_stands() -> None:
    pool = busy_holder()
    pool.offer("r", [*LONG, *chain(2, 1)])
    pool.placed()
    told = pool.scheduler.explain("r", pool.now)
    assert told is not None
    assert told.state == "waiting"
    assert {one.worker: one.room for one in told.candidates} == {"a": False, "b": True}
