"""Who may take a request: named workers, labels, adapters, sessions."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.router.placement.types import Placement, Shed
from tests.support.router.placement_pool import Pool, chain

LONG = chain(1, 40)


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


def test_what_a_waking_worker_may_take_is_not_refused() -> None:
    pool = Pool("ab", no_worker_s=3.0)
    for name in "ab":
        pool.join(name, draining=True)
    pool.offer("r", tokens=5)
    pool.offer("other", tokens=5, worker="gone")
    pool.pass_time(2.0)
    pool.join("b", draining=True, waking=True)
    pool.pass_time(2.0)
    (decision,) = pool.decide()
    assert isinstance(decision, Shed)
    assert decision.request.id == "other"
    pool.join("b")
    assert pool.placed() == {"r": "b"}


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


def test_a_session_of_the_same_name_is_another_one_for_another_tenant() -> None:
    def homes(tenant: str) -> list[str]:
        found = []
        for n in range(40):
            pool = Pool("abcd")
            pool.offer("1", chain(1, 4), session=f"s{n}", affinity="hard", tenant=tenant)
            found.append(pool.placed()["1"])
        return found

    assert homes("acme") == homes("acme")
    together = sum(mine == theirs for mine, theirs in zip(homes("acme"), homes("rival"), strict=True))
    assert together < 20, "no more than chance puts on the same one of four workers"


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
