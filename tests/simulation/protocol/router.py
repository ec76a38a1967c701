"""A router process: the real session, with a scheduler that places at random and sheds some, or with the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.broker.membership.members import Members
from headrace.broker.settings import Timing
from headrace.jetstream.subjects import Subjects
from headrace.router.index.blocks import Blocks, Words
from headrace.router.index.table import PrefixTable
from headrace.router.index.view import Caches
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Decision
from headrace.router.session.session import RouterSession
from headrace.router.session.window import RouterDeps, SchedulingPort
from headrace.router.settings import SessionOptions
from tests.simulation.virtual.machine import Machine
from tests.support.router.scheduler import RandomScheduler


def random_scheduler(machine: Machine, shed: float) -> SchedulingPort:
    return RandomScheduler(machine.rng, shed=shed)


def real_scheduler(machine: Machine, shed: float) -> SchedulingPort:
    """What a router really runs, over an empty index; it sheds what it must."""
    return Scheduler(
        SchedulerSettings(entry_expiry_s=3.0), Caches(PrefixTable(Blocks, Words)), name=machine.id, seed=machine.world.seed
    )


async def run_router(
    machine: Machine,
    subjects: Subjects,
    pool: str,
    scheduler: SchedulingPort,
    *,
    timing: Timing,
    on_decided: Callable[[], None],
) -> None:
    """One router process of one pool, until it crashes. `on_decided`: it has just decided something."""
    members = Members(machine.messaging, subjects, lease_ttl_s=timing.lease_ttl_s)
    decide = scheduler.decide

    def watched(now_s: float) -> list[Decision]:
        decisions = decide(now_s)
        if decisions:
            on_decided()
        return decisions

    scheduler.decide = watched  # type: ignore[method-assign]
    deps = RouterDeps(
        messaging=machine.messaging,
        subjects=subjects,
        members=members,
        pool=pool,
        router=machine.id,
        options=SessionOptions(timing=timing, window=100),
        wall=machine.wall,
    )
    session = RouterSession(deps, scheduler)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(members.run())
        await session.run()
