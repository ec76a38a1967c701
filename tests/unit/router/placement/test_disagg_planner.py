"""Where prompts are computed: who may, what is done while nobody is ready, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.router.errors import SettingsInvalid
from headrace.router.placement.disagg_planner import announced
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Placement, Shed
from tests.support.router.disagg_pool import LONG, apart, where
from tests.support.router.placement_pool import Pool, chain


def test_prefill_workers_never_get_requests() -> None:
    pool = apart("ab", "pq", lookahead=100.0)
    for n in range(8):
        pool.offer(f"r{n}", chain(n + 1, 4))
    assert set(pool.placed().values()) <= {"a", "b"}
    pool = Pool("")
    pool.apart(prefill="p")
    pool.offer("r", LONG)
    assert pool.placed() == {}


def test_a_pool_without_a_prefill_side_says_nothing_of_prefill() -> None:
    pool = Pool("a")
    pool.offer("r", LONG)
    placement = pool.placement()
    assert placement.prefill is None
    assert announced(placement) == ""


def test_a_worker_that_changes_its_role_changes_sides() -> None:
    pool = Pool("a")
    pool.apart(decode="c")
    pool.join("a", role="prefill", handover="sim")
    assert [load.info.worker for load in pool.scheduler.pool.loads] == ["c"]
    pool.report("c", running=3)
    pool.offer("r1", LONG)
    assert where(pool.placement()) == (True, "pays")
    pool.event("prefilled", "r1", "c")
    pool.join("a", role="aggregated")
    assert {load.info.worker for load in pool.scheduler.pool.loads} == {"a", "c"}
    pool.pass_time(6)
    pool.report("c", running=7)
    pool.offer("r2", LONG)
    placement = pool.placement()
    assert (placement.worker, where(placement)) == ("a", (False, "aggregated"))


def test_the_last_prefill_worker_that_leaves_leaves_its_decode_workers_to_compute_by_themselves() -> None:
    pool = apart()
    pool.scheduler.remove_worker("p", pool.now)
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, "no_prefill_worker")


@pytest.mark.parametrize(
    ("decode", "reason"),
    [
        ({"role": "decode", "handover": "other"}, "no_prefill_worker"),
        ({"role": "decode", "handover": ""}, "aggregated"),
        ({"role": "aggregated", "handover": "sim"}, "aggregated"),
    ],
)
def test_only_workers_that_hand_over_in_the_same_way_work_together(decode: dict[str, str], reason: str) -> None:
    pool = Pool("")
    pool.apart(prefill="p")
    pool.join("a", **decode)
    pool.report("a", running=4)
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, reason)


def test_a_draining_prefill_worker_gets_nothing_more() -> None:
    pool = apart()
    pool.apart(prefill="p", draining=True)
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, "no_prefill_worker")


def test_a_prefill_worker_without_the_adapter_computes_nothing_for_it() -> None:
    pool = Pool("")
    pool.apart(decode="a", adapters=frozenset({"x"}))
    pool.apart(prefill="p")
    pool.report("a", running=4)
    pool.offer("r", LONG, adapter="x")
    assert where(pool.placement()) == (False, "no_prefill_worker")
    pool.apart(prefill="q", adapters=frozenset({"x"}))
    pool.pass_time(6)
    pool.report("a", running=4)
    pool.offer("r2", LONG, adapter="x")
    placement = pool.placement()
    assert where(placement)[0]
    assert placement.prefill is not None
    assert placement.prefill.worker in ("", "q")


def test_while_no_prefill_worker_is_ready_prompts_are_computed_locally_unless_told_otherwise() -> None:
    pool = apart("a", "")
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, "no_prefill_worker")


def test_wait_keeps_long_prompts_until_a_prefill_worker_comes_and_lets_short_ones_pass() -> None:
    pool = apart("a", "", prefill_unready="wait")
    pool.offer("long", LONG)
    pool.offer("short", tokens=10)
    assert pool.placed() == {"short": "a"}
    pool.pass_time(60)
    assert pool.decide() == []
    pool.apart(prefill="p")
    assert where(pool.placement()) == (True, "pays")


def test_refuse_ends_long_prompts_at_once_and_lets_short_ones_pass() -> None:
    pool = apart("a", "", prefill_unready="refuse")
    pool.offer("long", LONG)
    pool.offer("short", tokens=10)
    shed, placed = sorted(pool.decide(), key=lambda one: isinstance(one, Placement))
    assert isinstance(shed, Shed)
    assert (shed.request.id, shed.code) == ("long", "no_prefill_worker")
    assert shed.retry_after_s is not None
    assert isinstance(placed, Placement)
    assert pool.scheduler.waiting == 0


def test_workers_that_compute_their_own_prompts_are_there_for_what_decode_workers_refuse() -> None:
    pool = apart("a", "", prefill_unready="refuse")
    pool.join("b")
    pool.offer("r", LONG)
    assert pool.placed() == {"r": "b"}


def test_never_is_not_affected_by_nobody_being_ready() -> None:
    pool = apart("a", "", prefill="never", prefill_unready="refuse")
    pool.offer("r", LONG)
    assert where(pool.placement()) == (False, "never")


def test_the_decision_can_be_explained() -> None:
    pool = apart()
    pool.offer("r", LONG)
    placement = pool.placement()
    explanation = pool.scheduler.explain("r", pool.now)
    assert explanation is not None
    assert explanation.prefill == placement.prefill
    assert explanation.candidates[0].cost_s < 2.0


def test_the_predicted_time_to_the_first_token_is_that_of_the_way_taken() -> None:
    pool = apart()
    pool.offer("r", LONG)
    placement = pool.placement()
    assert placement.predicted_ttft_s == pytest.approx(8192 / 24_000 + 0.1, abs=0.05)


def test_a_session_keeps_its_worker_wherever_its_prompts_are_computed() -> None:
    pool = apart("abcd", "p", prefill_lookahead_s=1e3)
    workers = set()
    for n in range(6):
        pool.offer(f"r{n}", chain(n + 1, 8), session="s")
        placement = pool.placement()
        assert placement.remote
        workers.add(placement.worker)
        pool.event("started", f"r{n}", placement.worker)
        pool.event("settled", f"r{n}", placement.worker)
        pool.pass_time(1)
        pool.report(placement.worker, running=4)
    assert len(workers) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill", "sometimes"),
        ("prefill_unready", "no"),
        ("prefill_min_tokens", -1),
        ("prefill_lookahead_s", 0.0),
        ("prefill_disturbance", -1.0),
        ("prefill_patience_s", -0.1),
        ("prefill_late", float("inf")),
        ("prefill_itl_s", -0.1),
        ("prefill_wait_s", 0.0),
        ("handover_s", 0.0),
        ("handover_token_s", 0.0),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_its_value(name: str, value: object) -> None:
    with pytest.raises(SettingsInvalid, match=name):
        SchedulerSettings(**{name: value})  # type: ignore[arg-type]


def test_nobody_is_disturbed_for_the_sake_of_a_few_milliseconds() -> None:
    def where(running: int, **settings: Any) -> bool:
        pool = apart(**settings)
        pool.report("a", running=running)
        pool.offer("r", tokens=400)
        placement = pool.placement()
        return placement.remote

    assert not where(0)  # there is nobody to disturb: it is sooner done where it is answered
    assert where(1)
    assert not where(1, prefill_patience_s=0.0)
