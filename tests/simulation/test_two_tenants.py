"""Two tenants on one pool, in virtual time, with the scheduler of routers and simulated engines: a flood of one costs the other
no more than its share.
"""

from __future__ import annotations

import random
import statistics

from benchmarks.backfill.world import Served, World
from benchmarks.disagg.node import Request
from headrace.broker.blocks import block_chain
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Waiting
from headrace.workers.sim.settings import SimSettings

BLOCK = 64
ENGINE = SimSettings(timing="h100-8b", block_size=BLOCK, blocks=6000, slots=16, waiting=100_000, context_length=8192)
PROMPT, OUTPUT = 256, 64


def requests(tenant: str, number: int, *, every_s: float, seed: int) -> list[Request]:
    """Requests of a tenant that share nothing. Their kind is the name of the tenant."""
    rng = random.Random(f"{tenant} {seed}")
    made = []
    for n in range(number):
        tokens = [rng.randrange(20_000) for _ in range(PROMPT)]
        made.append(Request(at_s=n * every_s, kind=tenant, tokens=tokens, output=OUTPUT, chain=block_chain(tokens, BLOCK)))
    return made


class TwoTenants(World):
    """Serves requests as those of the tenant that their kind names."""

    def __init__(self, served: list[Request], *, as_one: bool = False) -> None:
        self.as_one = as_one
        super().__init__(served, [], [ENGINE], SchedulerSettings())
        self.run()

    def _arrive(self, served: Served) -> None:
        request, now_s = served.request, self.clock.now_s
        waiting = Waiting(
            id=served.id,
            key=served,
            attempt=served.attempt,
            tokens=len(request.tokens),
            max_tokens=request.output,
            chain=request.chain,
            block_size=BLOCK,
            request_class="std",
            tenant="all" if self.as_one else request.kind,
            arrived_s=now_s,
        )
        if self.router.offer(waiting, now_s) is not None:
            self.refused()
        self.changed()

    def of(self, tenant: str) -> list[Served]:
        return [one for one in self.interactive if one.request.kind == tenant]

    def waits_s(self, tenant: str) -> list[float]:
        """Seconds until the first token of each request."""
        return [one.ttft_s for one in self.of(tenant)]


QUIET = requests("quiet", 60, every_s=0.25, seed=1)  # a sixth of what the pool can do
FLOOD = requests("flood", 900, every_s=0.0, seed=2)  # half a minute of work and more, all at once


def test_a_flood_of_one_tenant_costs_another_that_stays_within_its_share_a_bounded_wait() -> None:
    """It pays once for what was placed before it came and for the slack of the queue, and then waits for one free slot."""
    alone, beside = TwoTenants(QUIET), TwoTenants([*QUIET, *FLOOD])
    assert max(alone.waits_s("quiet")) < 0.1
    waits = beside.waits_s("quiet")
    assert all(one.ended_s > 0 for one in beside.of("quiet")), "none was refused"
    assert statistics.median(waits) < 1.0
    assert max(waits) < 5.0
    assert max(waits[len(waits) // 2 :]) < 1.0, "the wait of the beginning is made up for"
    unprotected = TwoTenants([*QUIET, *FLOOD], as_one=True).waits_s("quiet")
    assert statistics.median(unprotected) > 20.0, "without shares it would wait behind the whole flood"


def test_two_tenants_that_both_want_more_than_there_is_get_a_half_each() -> None:
    both = TwoTenants([*requests("quiet", 600, every_s=0.0, seed=1), *FLOOD[:600]])
    until_s = statistics.median(one.ended_s for one in both.interactive)
    quiet, flood = (sum(one.ended_s <= until_s for one in both.of(tenant)) for tenant in ("quiet", "flood"))
    assert quiet + flood >= 600
    assert abs(quiet - flood) <= 0.05 * (quiet + flood)
