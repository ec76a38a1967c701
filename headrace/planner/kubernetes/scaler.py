"""Carries a plan out on Kubernetes: more workers by the scale of an object, fewer by that and the deletion cost of the victims.

What is asked for is a number and never "one more": it follows from the pods that are workers, those that are coming and what
the plan has asked for. A start whose pod waits for a machine is not asked for twice, and a change whose answer was lost is not
made twice. A pod that leaves gets SIGTERM, which is a worker's drain.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import structlog

from headrace.broker.messages import WorkerMember
from headrace.planner.kubernetes.api import KubernetesApi
from headrace.planner.kubernetes.errors import ChangedMeanwhile, KubernetesError, NotScalable, ObjectMissing
from headrace.planner.kubernetes.scaled_objects import (
    DELETION_COST,
    find_scaled,
    read_scale,
    set_cost,
    set_replicas,
    staying,
)
from headrace.planner.plan import Plan

log = structlog.get_logger()

FIRST_TO_GO = "-1000"
TRIES = 2  # of a change whose object was changed meanwhile: each reads anew
Members = Callable[[], Awaitable[Sequence[WorkerMember]]]


class KubernetesScaler:
    """Starts and stops workers of a namespace. Raises the KubernetesError family; nothing is repeated but a conflict, once."""

    def __init__(self, api: KubernetesApi, members: Members) -> None:
        """`members`: reads the workers that are there."""
        self._api = api
        self._members = members

    async def start(self, plan: Plan, role: str) -> str:
        """Have as many workers of a role as the plan starts, and return what is scaled. Called again it changes nothing."""
        scaled = await find_scaled(self._api, plan.pool, role)
        asked = plan.starting.get(role, 0) + sum(one.kind == "start" and one.role == role for one in plan.actions)

        async def change() -> None:
            scale, pods = await read_scale(self._api, scaled)
            here = staying(pods, {one.host for one in await self._members()})
            coming = max(0, scale.spec.replicas - len(here))
            wanted = min(scale.spec.replicas + max(0, asked - coming), scaled.most)
            if wanted <= scale.spec.replicas:
                if coming < asked:
                    raise NotScalable(f"{scaled.name} has {scale.spec.replicas} and may have {scaled.most}")
                return  # those that were asked for are coming, or wait for a machine
            await set_replicas(self._api, scaled, scale, wanted)
            log.info("planner.scaled", object=scaled.name, replicas=wanted, before=scale.spec.replicas)

        await self._unless_changed(change)
        return scaled.name

    async def leave(self, plan: Plan, role: str, workers: Sequence[str]) -> list[str]:
        """Have these workers leave and return those that do."""
        scaled = await find_scaled(self._api, plan.pool, role)

        async def change() -> None:
            members = await self._members()
            hosts = {one.worker: one.host for one in members}
            scale, pods = await read_scale(self._api, scaled)
            there = {one.metadata.name: one for one in pods}
            for worker in workers:
                if hosts.get(worker) not in there:
                    raise NotScalable(
                        f"worker {worker} is no pod of {scaled.name}: its host is {hosts.get(worker, 'unknown')!r}"
                    )
            going = {hosts[worker] for worker in workers}
            here = staying(pods, set(hosts.values()))
            wanted = sum(one.metadata.name not in going for one in here)
            if wanted < scaled.least:
                raise NotScalable(f"{scaled.name} may not have fewer than {scaled.least}")
            if wanted >= scale.spec.replicas:
                return  # they leave already
            costs = {one.metadata.name: one.metadata.annotations.get(DELETION_COST) for one in here} if scaled.by_cost else {}
            await self._choose(going, costs)
            try:
                await set_replicas(self._api, scaled, scale, wanted)
            except KubernetesError:
                await self._unchoose(going & costs.keys())
                raise
            log.info("planner.scaled", object=scaled.name, replicas=wanted, before=scale.spec.replicas)

        await self._unless_changed(change)
        return list(workers)

    async def _choose(self, going: set[str], costs: dict[str, str | None]) -> None:
        """Mark the pods that are to leave, and take back the marks of a change that was never made."""
        for pod, cost in costs.items():
            wanted = FIRST_TO_GO if pod in going else None
            if (cost == FIRST_TO_GO) == (wanted is not None):
                continue
            try:
                await set_cost(self._api, pod, wanted)
            except ObjectMissing:
                continue  # it is gone

    async def _unchoose(self, pods: set[str]) -> None:
        """Take marks back as far as that works: those that remain are taken back before the next choice."""
        for pod in pods:
            try:
                await set_cost(self._api, pod, None)
            except KubernetesError as error:
                log.warning("planner.mark_remains", pod=pod, error=str(error))

    async def _unless_changed(self, change: Callable[[], Awaitable[None]]) -> None:
        for tried in range(1, TRIES + 1):
            try:
                await change()
                break
            except ChangedMeanwhile:
                if tried == TRIES:
                    raise
