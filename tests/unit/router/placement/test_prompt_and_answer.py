"""Fleets with prefill workers: where a prompt is computed and where it is answered are one decision, and move together."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.router.placement.types import Placement
from tests.support.router.placement_pool import Pool, chain

PROMPT = chain(1, 20)  # 10,240 tokens: 0.43 s at the speed assumed
FLEETS = {"cheap": ("d1", "p1"), "dear": ("d2", "p2")}


def apart(**settings: Any) -> Pool:
    """Two fleets that compute all prompts at prefill workers of their own, whose KV blocks the other cannot take over."""
    pool = Pool("", prefill="always", **settings)
    for price, (fleet, (decode, prefill)) in enumerate(FLEETS.items(), 1):
        pool.join(decode, role="decode", handover=f"blocks of {fleet}", fleet=fleet, price=float(price))
        pool.join(prefill, role="prefill", handover=f"blocks of {fleet}", fleet=fleet, price=float(price))
    for pair in FLEETS.values():
        for worker in pair:
            pool.report(worker)
    return pool


def is_in(placement: Placement, fleet: str) -> None:
    """The answer is in this fleet, and the prompt is computed there: by the worker that is named, or by any that hands over."""
    decode, prefill = FLEETS[fleet]
    assert placement.fleet is not None
    assert (placement.worker, placement.fleet.fleet) == (decode, fleet)
    assert placement.prefill is not None
    assert placement.prefill.remote
    assert placement.prefill.worker in ("", prefill)


def busy(pool: Pool, fleet: str, tokens: int) -> None:
    """Another router has placed a prompt in this fleet."""
    decode, prefill = FLEETS[fleet]
    fields: dict[str, Any] = {"tokens": tokens, "uncached": tokens, "blocks": 0, "by": "r2", "prefill": prefill}
    pool.event("placed", f"busy-{fleet}", decode, **fields)


def test_prompt_and_answer_are_in_the_fleet_that_meets_the_target_for_the_least_price() -> None:
    pool = apart()
    pool.offer("r", PROMPT, ttft_target_s=2.0)
    is_in(pool.placement(), "cheap")


def test_a_queue_before_the_prefill_workers_of_a_fleet_moves_the_answer_too() -> None:
    pool = apart()
    busy(pool, "cheap", 100_000)
    pool.offer("r", PROMPT, ttft_target_s=2.0)
    is_in(pool.placement(), "dear")


def test_a_request_that_waits_for_the_dear_fleet_takes_prompt_and_answer_to_the_cheap_one_when_that_frees_up() -> None:
    pool = apart()
    busy(pool, "cheap", 100_000)
    pool.report("d2", running=8)
    pool.offer("r", PROMPT, ttft_target_s=2.0)
    assert pool.placed() == {}, "it waits for the dear fleet, whose decode worker is full"
    pool.pass_time(0.2)
    pool.event("prefilled", "busy-cheap", "d1")
    pool.report("p1")
    pool.report("d1")
    is_in(pool.placement(), "cheap")


@pytest.mark.parametrize("then", FLEETS)
def test_a_request_that_has_waited_long_takes_both_to_the_fleet_in_which_a_place_is_free(then: str) -> None:
    pool = apart(max_wait_s=0.5)
    for decode, _ in FLEETS.values():
        pool.report(decode, running=8)
    pool.offer("r", PROMPT, ttft_target_s=2.0)
    assert pool.placed() == {}, "no decode worker has a place"
    pool.pass_time(1.0)
    for fleet, (decode, prefill) in FLEETS.items():
        pool.report(decode, running=0 if fleet == then else 8)
        pool.report(prefill)
    is_in(pool.placement(), then)


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_prefix_that_is_cached_at_the_prefill_worker_of_a_fleet_draws_prompt_and_answer_there(fleet: str) -> None:
    pool = apart()
    pool.holds(FLEETS[fleet][1], PROMPT[:19])
    pool.offer("r", PROMPT, ttft_target_s=0.2)  # in time only where the prefix is
    is_in(pool.placement(), fleet)


def test_after_its_fleet_has_died_a_request_is_computed_and_answered_in_the_other() -> None:
    pool = apart()
    pool.offer("r", PROMPT, ttft_target_s=2.0)
    is_in(pool.placement(), "cheap")
    for worker in FLEETS["cheap"]:
        pool.scheduler.remove_worker(worker, pool.now)
    pool.offer("r", PROMPT, ttft_target_s=2.0, attempt=2)
    placement = pool.placement()
    assert placement.worker == "d2"
    assert placement.prefill is not None
    assert placement.prefill.remote
    assert placement.prefill.worker in ("", "p2")


def test_a_fleet_whose_prefill_workers_are_gone_computes_the_prompt_where_it_answers_and_not_in_the_other() -> None:
    """Blocks of the other fleet would be of no use to it."""
    pool = apart()
    pool.scheduler.remove_worker("p1", pool.now)
    pool.scheduler.remove_worker("d2", pool.now)
    pool.offer("r", PROMPT, ttft_target_s=2.0)
    placement = pool.placement()
    assert placement.worker == "d1"
    assert placement.prefill is not None
    assert not placement.prefill.remote
