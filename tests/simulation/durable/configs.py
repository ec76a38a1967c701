"""The deployments under which stored jobs are tried, and the faults that strike them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tests.simulation.durable.deployment import DurableDeployment, DurableShape
from tests.simulation.durable.jobs import JobWish
from tests.simulation.search import Scenario
from tests.simulation.virtual.network import SimConfig
from tests.simulation.virtual.world import World

FAULTS = ("crash", "crash", "powercut", "freeze", "cut", "gap", "outage", "drain")
STREAM = JobWish(durable=True, parts=((12,),))
LONG_STREAM = JobWish(durable=True, parts=((40, 4),))


def durable(
    name: str,
    *jobs: JobWish,
    faults: int = 5,
    kinds: Sequence[str] = FAULTS,
    config: SimConfig | None = None,
    victims: str = "WJ",
    horizon_s: float = 10.0,
    until_s: float = 150.0,
    **options: object,
) -> Scenario:
    """`victims`: workers (W), carriers (J), routers (R)."""
    shape = DurableShape(jobs=jobs, **options)  # type: ignore[arg-type]
    counts = {"W": shape.workers, "J": shape.carriers, "R": shape.routers}
    names = [f"{kind}{i}" for kind in victims for i in range(counts[kind])]

    def build(world: World) -> DurableDeployment:
        return DurableDeployment(world, shape).build()

    return Scenario(
        name=name,
        build=build,
        config=config or SimConfig(),
        faults=faults,
        kinds=kinds,
        victims=names,
        horizon_s=horizon_s,
        until_s=until_s,
    )


CONFIGS = {
    s.name: s
    for s in (
        durable("plain", JobWish(parts=((8,), (3, 2))), JobWish(parts=((40,),))),
        durable("streams", STREAM, LONG_STREAM, carriers=3),
        durable("routed", JobWish(parts=((8,), (3, 2))), STREAM, LONG_STREAM, routers=1, victims="WJR"),
        durable("two_routers", JobWish(parts=((40,),)), STREAM, routers=2, shed=0.3, faults=8, victims="WJR"),
        durable("routed_cancel", JobWish(parts=((40,),), cancel_s=1.5), LONG_STREAM, routers=1, victims="WJR"),
        durable("cancel", JobWish(parts=((40,),), cancel_s=1.5), dataclasses.replace(LONG_STREAM, cancel_s=1.5)),
        durable("late_cancel", JobWish(parts=((6,),), cancel_s=1.0), dataclasses.replace(STREAM, cancel_s=1.6)),
        durable("expire", JobWish(parts=((40,),), deadline_s=2.5), dataclasses.replace(LONG_STREAM, deadline_s=2.5)),
        durable("twice", JobWish(parts=((12,),), twice_s=3.0), dataclasses.replace(LONG_STREAM, twice_s=2.0), carriers=3),
        durable(
            "carrier_poison", JobWish(poison="carrier"), JobWish(), dataclasses.replace(STREAM, poison="carrier"), carriers=3
        ),
        durable(
            "worker_poison", JobWish(poison="worker", parts=((60,),)), JobWish(durable=True, poison="worker", parts=((60,),))
        ),
        durable(
            "closing",
            JobWish(batch="b", parts=((40,),)),
            JobWish(batch="b", parts=((4,),)),
            JobWish(batch="c", parts=((40,),)),
            JobWish(),
            closing=(("b", 2.0, "cancelled"), ("c", 1.0, "expired")),
        ),
        durable("malformed", JobWish(malformed=True), JobWish(malformed=True, durable=True), JobWish()),
        durable("large", JobWish(parts=((8,),), twice_s=2.0), JobWish(), STREAM, carriers=3, response_bytes=40),
        durable("unknown", JobWish(slug="other"), dataclasses.replace(STREAM, slug="other"), JobWish()),
        durable("no_workers", JobWish(deadline_s=2.0), dataclasses.replace(STREAM, deadline_s=4.0), workers=0),
        durable("carriers_die", JobWish(parts=((60,),)), faults=30, kinds=("crash",), carriers=3, victims="J", horizon_s=60.0),
        durable(
            "poison_and_deaths",
            JobWish(poison="worker", parts=((60,),)),
            faults=12,
            kinds=("crash",),
            carriers=3,
            victims="J",
            poison_limit=5,
        ),
        durable("restarts", JobWish(parts=((40,),)), LONG_STREAM, faults=9, kinds=("outage", "cut", "freeze")),
        durable("nodedupe", JobWish(parts=((8,),)), STREAM, carriers=3, config=SimConfig(dedupe=False)),
        durable("full", JobWish(parts=((8,),)), STREAM, config=SimConfig(full=0.2)),
    )
}
# One slot that is taken for longer than an hour, with a job behind it whose deadline is a day away.
LONG_WAIT = durable(
    "long_wait",
    JobWish(deadline_s=86_400.0),
    JobWish(at_s=5.0, deadline_s=86_400.0),
    faults=0,
    carriers=1,
    workers=1,
    slots=1,
    still_until_s=3_700.0,
    until_s=3_800.0,
)
SMALL = durable("small", JobWish(parts=((5,),)), dataclasses.replace(STREAM, parts=((6,),)), slots=2)
ROUTED = durable("small_routed", JobWish(parts=((5,),)), dataclasses.replace(STREAM, parts=((6,),)), slots=2, routers=1)
