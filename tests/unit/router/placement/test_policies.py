"""The policies beside each other."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.router.build import builder
from headrace.router.errors import SettingsInvalid
from headrace.router.placement.settings import SchedulerSettings
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
