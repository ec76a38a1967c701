"""Pulls stored jobs: for each model that has capacity as many as its pools can use soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from headrace.broker.durable.carrier.carrier_deps import CarrierDeps
from headrace.broker.durable.carrier.held_job import HeldJobs
from headrace.broker.durable.decision import window
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Delivery, PullLoop
from headrace.jetstream.subjects import slug
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import job_consumer

log = structlog.get_logger()

ENSURE_RETRY_S = 1.0


def slug_of_pool(pool: str) -> str:
    """Return the slug of a pool's model: the pool's name without its hex digits."""
    return pool.rpartition("-")[0]


class JobIntake:
    """The pull loops of one carrier. `on_delivery(slug, delivery)` gets the jobs."""

    def __init__(
        self, deps: CarrierDeps, held: HeldJobs, tasks: TaskScope, on_delivery: Callable[[str, Delivery], None]
    ) -> None:
        self._deps = deps
        self._held = held
        self._tasks = tasks
        self._on_delivery = on_delivery
        self._pulls: dict[str, PullLoop] = {}
        self._stopped = True
        self._pause_end: asyncio.TimerHandle | None = None  # None = there is no pause
        self._due = False
        self._capacity: dict[str, int] | None = None  # slots by slug; None = something has changed since they were counted
        self._loop = asyncio.get_running_loop()
        deps.ingress.members.on_change(self._on_change)
        deps.ingress.models.on_change(self._on_change)

    def has_capacity(self, model: str) -> bool:
        """Return whether a worker serves the model of this slug."""
        if self._capacity is None:
            self._capacity = self._count_slots()
        return model in self._capacity

    def pause(self) -> None:
        """Take no more jobs for a moment, because the queue is full or the broker refuses."""
        if self._pause_end is not None:
            self._pause_end.cancel()
        self._pause_end = self._loop.call_later(self._deps.settings.retry_s, self._go_on)
        self.balance()

    def _go_on(self) -> None:
        """End the pause. The clock is not asked: a timer may be a moment early by it, and nothing else may ever come."""
        self._pause_end = None
        self.balance()

    def start(self) -> None:
        """Begin to take jobs."""
        self._stopped = False
        self.balance()

    def stop(self) -> None:
        """Take no more jobs."""
        self._stopped = True
        self.balance()

    def _on_change(self) -> None:
        self._capacity = None
        self.balance()

    def balance(self) -> None:
        """Ask for as many jobs as there is room for, once per turn of the event loop."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self._balance)

    def _balance(self) -> None:
        self._due = False
        if self._capacity is None:
            self._capacity = self._count_slots()
        slots = self._capacity if not self._stopped else {}
        for model in slots:
            if model not in self._pulls:
                self._open(model)
        ingress = self._deps.ingress
        allowed = ingress.lease_held and not self._stopped and self._pause_end is None
        carriers = max(1, len(ingress.members.ingresses()))
        for model, loop in self._pulls.items():
            most = window(slots.get(model, 0), carriers, self._deps.settings.window) if allowed else 0
            wanted = max(0, most - self._held.count(model))
            if loop.credit != wanted:
                loop.add_credit(wanted - loop.credit)

    def _count_slots(self) -> dict[str, int]:
        """Return the slots of the live workers behind each slug: of a model, of an alias, of an adapter that is loaded."""
        members, models = self._deps.ingress.members, self._deps.ingress.models
        slots = {pool: sum(max(1, member.slots) for member in members.serving_workers(pool)) for pool in members.pools()}
        pools: dict[str, set[str]] = {}
        for pool in slots:
            pools.setdefault(slug_of_pool(pool), set()).add(pool)
        for name in models.listed_names():
            if (pool_of := models.pool_of(name)) is not None:
                pools.setdefault(slug(name), set()).add(pool_of)
        found = {model: sum(slots.get(pool, 0) for pool in behind) for model, behind in pools.items()}
        return {model: n for model, n in found.items() if n and self._deps.renderer.serves(model)}

    def _open(self, model: str) -> None:
        spec = job_consumer(self._deps.subjects, model)
        messaging = self._deps.messaging

        async def ensure() -> None:
            await messaging.ensure_consumer(spec)

        loop = messaging.pull(spec.stream, spec.name, lambda delivery: self._on_delivery(model, delivery), on_missing=ensure)
        self._pulls[model] = loop
        self._tasks.spawn(self._run(model, loop))

    async def _run(self, model: str, loop: PullLoop) -> None:
        spec = job_consumer(self._deps.subjects, model)
        while True:
            try:
                await self._deps.messaging.ensure_consumer(spec)
                break
            except JetStreamError as error:
                log.warning("consumer.not_made", consumer=spec.name, error=str(error))
                await asyncio.sleep(ENSURE_RETRY_S)
        await loop.run()
