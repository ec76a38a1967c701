"""The policies beside each other."""

from __future__ import annotations

from collections import Counter
from math import inf, isinf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headrace.router.errors import SettingsInvalid
from headrace.router.main import builder
from headrace.router.placement import kernel as interpreted
from headrace.router.placement import policies
from headrace.router.placement.calibration import SpeedEstimate
from headrace.router.placement.first_tokens import ARRIVAL_S, MOST_EACH, Promises
from headrace.router.placement.load import LoadTable
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Waiting, WorkerInfo
from headrace.router.settings import RouterOptions
from tests.support.router.placement_pool import Pool, chain

LONG = chain(1, 40)


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


def test_a_process_warns_once_of_a_kernel_that_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "kernel", interpreted)
    policies._warn_not_compiled.cache_clear()
    with capture_logs() as logs:
        for _ in range(2):
            Pool("ab")
    assert [entry["event"] for entry in logs].count("kernel.not_compiled") == 1


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


OWN = "examples.fewest_requests:fewest_requests"


def test_a_policy_of_another_package_chooses() -> None:
    pool = Pool("ab", policy=OWN, lookahead=10.0)
    pool.report("a", running=1, queued_prefill_tokens=6000)
    pool.report("b", running=5, queued_prefill_tokens=100)
    pool.offer("r", tokens=100)
    assert pool.placed() == {"r": "a"}


@pytest.mark.parametrize(
    ("name", "why"),
    [("no_such_module:f", "ModuleNotFoundError"), ("examples.fewest_requests:nothing", "AttributeError"), ("a b:c", "a b")],
)
def test_a_policy_that_cannot_be_loaded_ends_the_router_at_its_start(name: str, why: str) -> None:
    with pytest.raises(SettingsInvalid, match=why) as raised:
        builder(RouterOptions(), SchedulerSettings(policy=name))
    assert repr(name) in str(raised.value)


SPEED = SpeedEstimate(0.008, 24_000.0, 0.0001)
seconds = st.floats(0.0, 10.0)


def table(*workers: str) -> LoadTable:
    loads = LoadTable()
    for worker in workers:
        loads.put(WorkerInfo(worker=worker, slots=8, fleet=worker), SPEED)
    return loads


def test_a_prompt_that_has_not_begun_leaves_others_a_part_of_its_predicted_time() -> None:
    promises = Promises(table("a", "b"), 0.1)
    promises.note("a", begins_s=1.0, takes_s=0.2, ttft_s=2.0, now_s=0.0)
    assert promises.slack(0.5).tolist() == [0.2, inf]
    assert promises.next_s(0.5) == 1.0 + ARRIVAL_S
    assert promises.next_s(1.0 + ARRIVAL_S) == inf, "one that is over wakes nobody again and again"
    assert promises.slack(1.0 + ARRIVAL_S).tolist() == [inf, inf]
    assert len(promises) == 0


def test_each_prompt_placed_beside_it_uses_its_slack_up() -> None:
    promises = Promises(table("a"), 0.1)
    promises.note("a", begins_s=1.0, takes_s=0.2, ttft_s=10.0, now_s=0.0)
    promises.note("a", begins_s=1.0, takes_s=0.75, ttft_s=100.0, now_s=0.0)
    assert promises.slack(0.0).tolist() == [0.25]


def test_no_more_than_some_are_kept_on_a_worker() -> None:
    promises = Promises(table("a"), 0.1)
    for _ in range(3 * MOST_EACH):
        promises.note("a", begins_s=1.0, takes_s=0.2, ttft_s=2.0, now_s=0.0)
    assert len(promises) == MOST_EACH


def test_a_worker_that_has_left_has_no_promises() -> None:
    loads = table("a", "b")
    promises = Promises(loads, 0.1)
    promises.note("a", begins_s=1.0, takes_s=0.2, ttft_s=2.0, now_s=0.0)
    loads.remove("a")
    assert promises.slack(0.5).tolist() == [inf]
    assert len(promises) == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), seconds, seconds, seconds), max_size=20), seconds)
def test_what_is_let_in_beside_a_prompt_never_makes_it_later_than_promised(
    offers: list[tuple[str, float, float, float]], now_s: float
) -> None:
    """Every prompt that the slack lets in is placed; the delay of each open promise stays within its part."""
    loads, part = table("a", "b"), 0.15
    promises = Promises(loads, part)
    delayed: list[tuple[str, float, float, list[float]]] = []  # worker, begins, allowed, delays
    for worker, begins_s, takes_s, ttft_s in offers:
        load = loads.get(worker)
        assert load is not None
        if takes_s > promises.slack(now_s)[load.column]:
            continue
        promises.note(worker, begins_s=begins_s, takes_s=takes_s, ttft_s=ttft_s, now_s=now_s)
        for other, other_begins_s, _, delays in delayed:
            if other == worker and other_begins_s + ARRIVAL_S > now_s:
                delays.append(takes_s)
        delayed.append((worker, begins_s, part * ttft_s, []))
    assert all(sum(delays) <= allowed + 1e-9 for _, _, allowed, delays in delayed)
    assert all(isinf(one) or one >= -1e-9 for one in promises.slack(now_s).tolist())


def two_fleets(**settings: Any) -> Pool:
    """A worker `a` in a step with 100 ms left, and a worker `b` that takes nothing."""
    pool = Pool("", **settings)
    pool.join("a", fleet="cheap", price=1.0)
    pool.join("b", fleet="dear", price=4.0)
    for _ in range(3):
        pool.report("a", running=1, step_s=0.35, step_prefill_tokens=8192, queued_prefill_tokens=600)
        pool.report("b", running=64, queued_prefill_tokens=500_000)
    return pool


def test_a_long_prompt_is_not_placed_beside_a_short_one_that_no_step_has_begun_with() -> None:
    pool = two_fleets()
    pool.offer("short", chain(1, 1), tokens=20, ttft_target_s=9.0)
    assert pool.placed() == {"short": "a"}
    pool.offer("long", chain(2, 16), ttft_target_s=9.0)
    assert pool.placed() == {}
    wake_s = pool.scheduler.next_wake_s(pool.now)
    assert wake_s is not None
    assert wake_s <= pool.now + 0.05
    pool.pass_time(0.1)
    assert pool.placed() == {"long": "a"}, "the engine has begun with the short one"


def test_without_promises_the_long_prompt_would_ride_along() -> None:
    pool = two_fleets(promise=1e6)
    pool.offer("short", chain(1, 1), tokens=20, ttft_target_s=9.0)
    assert pool.placed() == {"short": "a"}
    pool.offer("long", chain(2, 16), ttft_target_s=9.0)
    assert pool.placed() == {"long": "a"}


def test_a_request_that_has_waited_long_lets_others_in_beside_it() -> None:
    pool = two_fleets()
    pool.offer("short", chain(1, 1), tokens=20, arrived_s=pool.now - 20.0)
    assert pool.placed() == {"short": "a"}
    pool.offer("long", chain(2, 16), ttft_target_s=9.0)
    assert pool.placed() == {"long": "a"}


def one_fleet() -> Pool:
    """A worker in a step with 100 ms left."""
    pool = Pool("a")
    for _ in range(3):
        pool.report("a", running=1, step_s=0.35, step_prefill_tokens=8192, queued_prefill_tokens=600)
    return pool


def test_a_pool_with_one_fleet_promises_nothing_to_who_asks_for_no_time() -> None:
    pool = one_fleet()
    pool.offer("short", chain(1, 1), tokens=20)
    pool.offer("long", chain(2, 16))
    assert pool.placed() == {"short": "a", "long": "a"}


def test_a_pool_with_one_fleet_keeps_its_promise_to_who_asks_for_a_time() -> None:
    pool = one_fleet()
    pool.offer("short", chain(1, 1), tokens=20, ttft_target_s=9.0)
    assert pool.placed() == {"short": "a"}
    pool.offer("long", chain(2, 16))
    assert pool.placed() == {}
    pool.pass_time(0.1)
    assert pool.placed() == {"long": "a"}, "the engine has begun with the short one"


def test_who_asks_for_a_time_and_finds_nothing_waiting_takes_the_way_on_which_promises_are_made_and_kept() -> None:
    pool = one_fleet()
    place = pool.scheduler.place_now
    assert place(Waiting(id="asks", key=1, tokens=20, chain=chain(1, 1), ttft_target_s=9.0), pool.now) is None
    pool.offer("short", chain(1, 1), tokens=20, ttft_target_s=9.0)
    assert pool.placed() == {"short": "a"}
    assert place(Waiting(id="beside", key=2, tokens=20, chain=chain(2, 1)), pool.now) is None
    pool.pass_time(0.2)
    pool.offer("next", chain(3, 1), tokens=20)
    assert pool.placed() == {"next": "a"}
    usual = Waiting(id="usual", key=3, tokens=20, chain=chain(4, 1), arrived_s=pool.now)
    assert place(usual, pool.now) is not None, "no promise is left"
