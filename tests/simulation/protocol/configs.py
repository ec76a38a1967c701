"""The deployments under which the job protocol is tried, and the faults that strike them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tests.simulation.protocol.deployment import GIVE_UP_S, Deployment
from tests.simulation.protocol.requests import Wish
from tests.simulation.protocol.router import real_scheduler
from tests.simulation.protocol.shape import SLOW_CLIENT_S, SPILL_BYTES, Shape
from tests.simulation.search import Scenario
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM, SimConfig
from tests.simulation.virtual.world import World

LENGTHS = (1, 4, 12, 40)
FAULTS = ("crash", "crash", "powercut", "freeze", "cut", "gap", "drain", "outage", "cancel")
LONG = 60


def plain(n: int, *, poison: Sequence[str] = (), spread_s: float = 6.0) -> Callable[[Machine], list[Wish]]:
    """`n` requests of one choice; the first ones poisonous. A restarted ingress gets one."""

    def wishes(machine: Machine) -> list[Wish]:
        rng = machine.rng
        made = [
            Wish(at_s=rng.random() * spread_s, lengths=(LONG,) if i < len(poison) else (rng.choice(LENGTHS),), poison=p)
            for i, p in enumerate([*poison, *[""] * (n - len(poison))])
        ]
        return made if machine.incarnation == 0 else made[-1:]

    return wishes


def colourful(machine: Machine) -> list[Wish]:
    """One of each: several choices, short deadlines, large payloads, slow readers, clients that leave, invalid requests."""
    rng = machine.rng

    def at() -> float:
        return rng.random() * 6.0

    made = [
        Wish(at_s=at(), lengths=(4, 12, 1)),
        Wish(at_s=at(), lengths=(12, 12), payload=b"\1\0\0\0" * SPILL_BYTES),
        Wish(at_s=at(), lengths=(40,), deadline_s=rng.choice((1.0, 3.0, 6.0))),
        Wish(at_s=at(), lengths=(40, 4), pause_s=rng.choice((0.5, 2.0))),
        Wish(at_s=at(), lengths=(40,), cancel_s=rng.random() * 4.0),
        Wish(at_s=at(), lengths=(12,), invalid=True),
        Wish(at_s=at(), lengths=(40,), pause_s=rng.choice((0.1, SLOW_CLIENT_S + 1.0))),
    ]
    return made if machine.incarnation == 0 else made[: rng.randint(0, 2)]


def scenario(
    name: str,
    shape: Shape,
    *,
    faults: int,
    kinds: Sequence[str] = FAULTS,
    config: SimConfig | None = None,
    victims: Sequence[str] | None = None,
) -> Scenario:
    """All processes are victims, unless named."""
    counts = (("R", shape.routers), ("W", shape.workers), ("J", shape.ingresses))
    names = victims or [f"{letter}{i}" for letter, n in counts for i in range(n)]

    def build(world: World) -> Deployment:
        return Deployment(world, shape).build()

    return Scenario(
        name=name, build=build, config=config or SimConfig(), faults=faults, kinds=kinds, victims=names, until_s=90.0
    )


def leaving(n: int) -> Callable[[Machine], list[Wish]]:
    """Long requests, half of whose clients leave early."""

    def wishes(machine: Machine) -> list[Wish]:
        rng = machine.rng
        return [
            Wish(at_s=rng.random() * 3.0, lengths=(40,), cancel_s=2.0 + rng.random() * 10.0 if i % 2 else None)
            for i in range(n)
        ]

    return wishes


def spilled(n: int) -> Callable[[Machine], list[Wish]]:
    """Requests whose payload lies in the object store."""

    def wishes(machine: Machine) -> list[Wish]:
        rng = machine.rng
        return [Wish(at_s=rng.random() * 10.0, lengths=(12,), payload=b"\1\0\0\0" * SPILL_BYTES) for _ in range(n)]

    return wishes


def crowd(poison: int, innocents: int, tokens: int) -> Callable[[Machine], list[Wish]]:
    """Long requests that come almost at once, with some poison among them."""

    def wishes(machine: Machine) -> list[Wish]:
        rng = machine.rng
        kinds = ["worker"] * poison + [""] * innocents
        made = [Wish(at_s=rng.random(), lengths=(tokens,), poison=kind) for kind in kinds]
        return made if machine.incarnation == 0 else made[-1:]

    return wishes


def crowded(poison: int, innocents: int, workers: int, *, kills: int = 0, over_s: float = 10.0) -> Scenario:
    """One crowd on a pool with a real router: poison and nothing else crashes workers, or kills and nothing else."""
    shape = Shape(
        wishes=crowd(poison, innocents, 250 if kills else LONG),
        workers=workers,
        routers=1,
        slots=poison + innocents,
        scheduler=real_scheduler,
        poison_limit=5,  # as proven in tests/unit/broker/protocol/test_quarantine.py
        all_poison_limit=20,
        innocents_live=True,
        unlucky=4 if kills else 0,  # said in docs/reliability.md
    )
    name = f"{f'{poison} of {poison + innocents}' if poison else f'{kills} kills'} on {workers}"
    victims = [f"W{i}" for i in range(workers)]
    found = scenario(name, shape, faults=kills, kinds=["crash"], config=SimConfig(noise=0.0), victims=victims)
    return dataclasses.replace(found, horizon_s=over_s, until_s=120.0)


def backfill(n: int) -> Callable[[Machine], list[Wish]]:
    """Long batch requests that take every slot, and interactive ones that come while those run."""

    def wishes(machine: Machine) -> list[Wish]:
        rng = machine.rng
        made = [Wish(at_s=rng.random() * 2.0, lengths=(LONG,), batch=True) for _ in range(n)]
        made += [Wish(at_s=1.0 + rng.random() * 8.0, lengths=(rng.choice(LENGTHS),)) for _ in range(n)]
        return made if machine.incarnation == 0 else made[-2:]

    return wishes


NODEDUPE = SimConfig(dedupe=False)
GROUPS = {
    s.name: s
    for s in (
        crowded(1, 63, 1),
        crowded(1, 63, 2),
        crowded(1, 63, 4),
        crowded(5, 59, 4),
        crowded(5, 59, 6),
        crowded(0, 48, 3, kills=6, over_s=25.0),
        crowded(0, 48, 5, kills=10, over_s=25.0),
    )
}
CONFIGS = {
    s.name: s
    for s in (
        scenario("base", Shape(wishes=plain(2), workers=2, routers=1), faults=4),
        scenario(
            "nodedupe",
            Shape(wishes=plain(3), workers=3, routers=2, shed=0.02),
            faults=5,
            config=SimConfig(dedupe=False, full=0.05),
        ),
        scenario("held", Shape(wishes=plain(4), workers=1, routers=1, no_worker_wait_s=GIVE_UP_S), faults=4),
        scenario("held-norouter", Shape(wishes=plain(4), workers=1, no_worker_wait_s=2.0), faults=4, config=NODEDUPE),
        scenario("norouter", Shape(wishes=plain(3), workers=3), faults=4, config=NODEDUPE),
        scenario("norouter-dedupe", Shape(wishes=plain(3), workers=3), faults=4),
        scenario("shed", Shape(wishes=plain(3), workers=2, routers=2, shed=0.3), faults=4),
        scenario(
            "poison",
            Shape(wishes=plain(3, poison=["worker"]), workers=3, routers=1, innocents_live=True),
            faults=0,
            config=SimConfig(noise=0.0),
        ),
        scenario(
            "twopoison",
            Shape(wishes=plain(4, poison=["worker", "worker"]), workers=2, innocents_live=True),
            faults=0,
            config=SimConfig(noise=0.0),
        ),
        scenario(
            "manypoison",
            Shape(
                wishes=plain(24, poison=["worker", "engine", "worker"], spread_s=1.0),
                workers=2,
                slots=24,
                innocents_live=True,
                poison_limit=7,
            ),
            faults=0,
            config=SimConfig(noise=0.0),
        ),
        scenario(
            "enginepoison",
            Shape(wishes=plain(4, poison=["engine", "worker"]), workers=3, innocents_live=True),
            faults=0,
            config=SimConfig(noise=0.0),
        ),
        scenario(
            "noisypoison",
            Shape(wishes=plain(3, poison=["worker"]), workers=3, poison_limit=5),
            faults=0,
            config=NODEDUPE,
        ),
        scenario(
            "engine", Shape(wishes=plain(3, poison=["engine"]), workers=3, routers=1, poison_limit=6), faults=1, config=NODEDUPE
        ),
        scenario(
            "poisonfaults",
            Shape(wishes=plain(3, poison=["worker"]), workers=3, routers=1, poison_limit=6),
            faults=4,
            config=NODEDUPE,
        ),
        scenario("lapsecrash", Shape(wishes=plain(3), workers=2), faults=5, kinds=["freeze", "cut", "crash"]),
        scenario("gapcrash", Shape(wishes=plain(3), workers=2), faults=6, kinds=["gap", "gap", "crash"]),
        scenario(
            "lapseonly",
            Shape(wishes=plain(3), workers=2, routers=1, parked_tokens=4),
            faults=5,
            kinds=["cut", "freeze"],
            config=SimConfig(noise=0.2),
        ),
        scenario(
            "peaceful",
            Shape(wishes=plain(4), workers=3, innocents_live=True),
            faults=6,
            kinds=["drain", "outage", "gap", "flaky"],
            config=NODEDUPE,
        ),
        scenario("engines", Shape(wishes=plain(4), workers=3), faults=4, kinds=["engine", "flaky", "drain", "gap"]),
        scenario("colourful", Shape(wishes=colourful, workers=2, ingresses=2, max_rows=6, parked_tokens=6), faults=4),
        scenario(
            "ingresses",
            Shape(wishes=plain(2), workers=2, ingresses=3),
            faults=6,
            kinds=["crash", "freeze", "cut", "close", "gap"],
            config=NODEDUPE,
            victims=["J0", "J1", "J2", "W0"],
        ),
        scenario(
            "cancels",
            Shape(wishes=leaving(10), workers=2, slots=8),
            faults=6,
            kinds=["cut", "freeze", "cancel"],
            config=SimConfig(noise=0.25),
        ),
        scenario(
            "redelivery",
            Shape(wishes=plain(4), workers=2),
            faults=8,
            kinds=["redeliver", "redeliver", "crash"],
            config=SimConfig(noise=0.0),
            victims=["W0", "W1"],
        ),
        scenario(
            "outages",
            Shape(wishes=leaving(6), workers=3, unsuspected=True),
            faults=3,
            kinds=["outage"],
            config=SimConfig(noise=0.0, silent=0.0, reconnect_s=1.0),
        ),
        scenario(
            "spills",
            Shape(wishes=spilled(8), workers=2, slots=8),
            faults=8,
            kinds=["outage", "cut", "drain"],
            victims=["W0", "W1"],
        ),
        scenario(
            "handovers",
            Shape(wishes=leaving(6), workers=3),
            faults=12,
            kinds=["gap", "drain", "flaky"],
            config=SimConfig(noise=0.0),
            victims=["J0", "J0", "W0", "W1", "W2"],
        ),
        scenario(
            "shedonly",
            Shape(wishes=plain(5), workers=2, routers=2, shed=0.3, refused_unstarted=True),
            faults=0,
            config=SimConfig(dedupe=False, noise=0.05),
        ),
        scenario(
            "window",
            Shape(wishes=leaving(10), workers=2, slots=2, routers=2, shed=0.05),
            faults=8,
            kinds=["crash", "freeze", "cut", "gap", "cancel"],
            config=SimConfig(noise=0.1, full=0.1),
            victims=["R0", "R0", "R1", "R1", "W0", "J0"],
        ),
        scenario(
            "placing",
            Shape(wishes=leaving(10), workers=3, slots=2, routers=2, scheduler=real_scheduler),
            faults=8,
            config=SimConfig(noise=0.1, full=0.1),
        ),
        scenario(
            "fleets",
            Shape(wishes=leaving(10), workers=4, slots=2, routers=2, scheduler=real_scheduler, fleets=("cheap", "dear")),
            faults=10,
            kinds=["crash", "crash", "powercut", "freeze", "cut"],
            config=SimConfig(noise=0.1, full=0.1),
            victims=["W0", "W2", "W0", "W2", "R0", "R1"],  # a whole fleet, and routers
        ),
        scenario(
            "judgecut",
            Shape(wishes=leaving(6), workers=2, slots=6),
            faults=4,
            kinds=["cut"],
            config=SimConfig(noise=0.1),
            victims=["J0"],
        ),
        scenario(
            "far",
            Shape(wishes=leaving(6), workers=2, slots=6),
            faults=4,
            kinds=["cut"],
            config=SimConfig(delays_s=(0.1, 0.2, 0.4), noise=0.1),
            victims=["J0"],
        ),
        scenario(
            "twins",
            Shape(wishes=plain(4, poison=["worker"]), workers=3, poison_limit=6),
            faults=3,
            kinds=["outage", "cut", "gap"],
            config=SimConfig(dedupe=False, noise=0.1),
        ),
        scenario(
            "preempted",
            Shape(wishes=backfill(6), workers=2, slots=2, no_worker_wait_s=GIVE_UP_S),
            faults=4,
            config=NODEDUPE,
        ),
        scenario(
            "preempted-router",
            Shape(wishes=backfill(6), workers=2, slots=2, routers=1, scheduler=real_scheduler, no_worker_wait_s=GIVE_UP_S),
            faults=4,
        ),
        scenario(
            "stress",
            Shape(wishes=plain(4), workers=3, routers=2, shed=0.03, ingresses=2),
            faults=9,
            kinds=(*FAULTS, "engine", "flaky", "close"),
            config=SimConfig(dedupe=False, noise=0.1, full=0.1),
        ),
    )
}


def few(machine: Machine) -> list[Wish]:
    return [Wish(lengths=(6, 3)), Wish(at_s=0.1, lengths=(4,), payload=b"\1\0\0\0" * SPILL_BYTES)][: 2 - machine.incarnation]


def few_preempted(machine: Machine) -> list[Wish]:
    """A batch request on every slot, and interactive ones that need two of them."""
    made = [Wish(lengths=(20,), batch=True), Wish(lengths=(16,), batch=True)]
    made += [Wish(at_s=at, lengths=(4,)) for at in (0.4, 0.5)]
    return made[: 4 - 2 * machine.incarnation]


PREEMPTED = scenario("small-preempted", Shape(wishes=few_preempted, workers=2, slots=1), faults=0, config=CALM)
PREEMPTED_BY_ROUTER = scenario(
    "small-preempted-router",
    Shape(wishes=few_preempted, workers=2, slots=1, routers=1, scheduler=real_scheduler, no_worker_wait_s=GIVE_UP_S),
    faults=0,
    config=CALM,
)
SMALL = scenario("small", Shape(wishes=few, workers=2), faults=0, config=CALM)
