"""KV blocks that come from another zone cost more: near prefill workers are preferred, and far ones are used all the same."""

from __future__ import annotations

from typing import Any

from tests.support.router.disagg_pool import LONG, elsewhere
from tests.support.router.placement_pool import Pool, chain

SHORT = chain(3, 4)  # 2,048 tokens


def zones(prefill: str, *, decode: str = "east", **settings: Any) -> Pool:
    """A decode worker in a zone, and a prefill worker in each of these: `p-east`, `p-west`."""
    pool = Pool("", **settings)
    pool.join("a", role="decode", handover="sim", zone=decode)
    for zone in prefill.split():
        pool.join(f"p-{zone}", role="prefill", handover="sim", zone=zone.strip("-"))
    pool.report("a", running=4)
    return pool


def chosen(pool: Pool) -> tuple[str, str]:
    pool.offer("r", LONG)
    placement = pool.placement()
    assert placement.prefill is not None
    assert placement.prefill.remote
    return placement.prefill.worker, placement.prefill.reason


def test_a_prefill_worker_of_the_same_zone_is_named() -> None:
    assert chosen(zones("west east")) == ("p-east", "near")
    assert chosen(zones("east west")) == ("p-east", "near")


def test_without_zones_or_with_unknown_ones_any_may_take_it() -> None:
    assert chosen(zones("-1 -2", decode=""))[0] == ""
    assert chosen(zones("east west", decode=""))[0] == ""
    assert chosen(zones("east west", prefill_zone_token_s=0.0))[0] == ""
    assert chosen(zones("east east2", decode="south", prefill_zone_token_s=0.0))[0] == ""


def test_a_far_prefill_worker_is_used_where_there_is_no_near_one() -> None:
    assert chosen(zones("west"))[0] in ("", "p-west")


def test_a_near_prefill_worker_that_is_busy_is_passed_by_where_waiting_costs_more_than_the_way() -> None:
    pool = zones("west east")
    elsewhere(pool, "other", 40_000, decode="a", prefill="p-east")
    worker, _ = chosen(pool)
    assert worker != "p-east"


def test_a_prefix_in_another_zone_counts_against_the_way() -> None:
    pool = zones("west east")
    pool.holds("p-west", LONG[:15])
    assert chosen(pool) == ("p-west", "prefix_there")


def test_so_dear_a_way_that_computing_here_is_cheaper_is_not_taken() -> None:
    pool = zones("west", prefill_zone_token_s=0.001)
    pool.offer("r", LONG)
    placement = pool.placement()
    assert placement.prefill is not None
    assert not placement.prefill.remote


def test_each_decode_worker_has_its_own_near_ones() -> None:
    pool = zones("west east")
    pool.join("b", role="decode", handover="sim", zone="west")
    pool.report("b", running=4)
    found = set()
    for number in range(4):
        pool.offer(f"r{number}", chain(number + 10, 16))
        placement = pool.placement()
        assert placement.prefill is not None
        pool.event("prefilled", f"r{number}", placement.worker)
        pool.pass_time(1)
        found.add((placement.worker, placement.prefill.worker))
    assert found <= {("a", "p-east"), ("b", "p-west")}
    assert found
