"""Placements of the past under another policy."""

from __future__ import annotations

import random

from headrace.broker.codec import pack_u64
from headrace.broker.messages.control import Routed
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.replay import rerun

BLOCK = 16


def record(number: int, worker: str, chain: list[int], *, waited_s: float = 0.0) -> Routed:
    return Routed(
        at=1000.0 + number + waited_s,
        id=f"r{number}",
        worker=worker,
        tokens=BLOCK * len(chain),
        uncached=BLOCK * len(chain),
        waited_s=waited_s,
        block_size=BLOCK,
        blocks=len(chain),
        hashes=pack_u64(chain),
    )


def families(requests: int, count: int, workers: list[str]) -> list[Routed]:
    """Requests of `count` families with a common prefix each, dealt out in turn."""
    rng = random.Random(1)
    made = []
    for number in range(requests):
        family = rng.randrange(count)
        chain = [family * 1000 + i for i in range(20)] + [10**6 + number]
        made.append(record(number, workers[number % len(workers)], chain))
    return made


def test_the_record_and_another_policy_side_by_side() -> None:
    workers = ["a", "b", "c", "d"]
    records = families(200, 12, workers)
    result = rerun(records, SchedulerSettings(policy="kv"), capacity=dict.fromkeys(workers, 80))
    assert result.recorded.requests == result.replayed.requests == 200
    assert result.recorded.per_worker == dict.fromkeys(workers, 50)
    assert result.replayed.hit_blocks > 1.5 * result.recorded.hit_blocks  # the prefix policy finds what round robin loses
    assert result.replayed.uncached_tokens < result.recorded.uncached_tokens
    assert 0 < result.moved <= 200
    assert len(result.differences) == 20
    assert result.differences[0].recorded != result.differences[0].replayed


def test_a_policy_compared_with_itself_differs_little() -> None:
    workers = ["a", "b"]
    records = [record(n, workers[n % 2], [n]) for n in range(20)]
    result = rerun(records, SchedulerSettings(policy="round-robin"), capacity=dict.fromkeys(workers, 100))
    assert result.moved == 0
    assert result.recorded == result.replayed
    assert result.recorded.balance_requests == 1.0


def test_what_the_caches_held_at_the_start_counts() -> None:
    chain = [1, 2, 3, 4]
    records = [record(0, "a", chain)]
    held = {"b": {"device": pack_u64(chain)}}
    result = rerun(records, SchedulerSettings(policy="kv"), capacity={"a": 10, "b": 10}, held=held)  # type: ignore[arg-type]
    assert (result.recorded.hit_blocks, result.replayed.hit_blocks) == (0, 4)
    (difference,) = result.differences
    assert (difference.recorded, difference.replayed, difference.replayed_hit) == ("a", "b", 4)


def test_requests_come_in_the_order_of_their_arrival() -> None:
    late, early = record(0, "a", [1, 2], waited_s=0.0), record(1, "b", [1, 2], waited_s=50.0)
    result = rerun([late, early], SchedulerSettings(policy="direct"), capacity={"a": 10, "b": 10})
    assert result.recorded.requests == 2
    assert rerun([early, late], SchedulerSettings(policy="direct"), capacity={"a": 10, "b": 10}) == result
