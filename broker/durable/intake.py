"""Pulls stored jobs: for each model that has capacity as many as its pools can use soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from headrace.broker.durable.carrier_deps import CarrierDeps
from headrace.broker.durable.decision import window
from headrace.broker.durable.held_job import HeldJobs
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Delivery, PullLoop
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
        self._paused_until_s = 0.0
        self._due = False
        self._loop = asyncio.get_running_loop()
        deps.ingress.members.on_change(self.balance)

    def pause(self) -> None:
        """Take no more jobs for a moment, because the queue is full or the broker refuses."""
        self._paused_until_s = self._loop.time() + self._deps.settings.retry_s
        self._loop.call_at(self._paused_until_s, self.balance)
        self.balance()

    def start(self) -> None:
        """Begin to take jobs."""
        self._stopped = False
        self.balance()

    def stop(self) -> None:
        """Take no more jobs."""
        self._stopped = True
        self.balance()

    def balance(self) -> None:
        """Ask for as many jobs as there is room for, once per turn of the event loop."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self._balance)

    def _balance(self) -> None:
        self._due = False
        slots = self._slots() if not self._stopped else {}
        for slug in slots:
            if slug not in self._pulls:
                self._open(slug)
        ingress = self._deps.ingress
        allowed = ingress.lease_held and not self._stopped and self._loop.time() >= self._paused_until_s
        carriers = max(1, len(ingress.members.ingresses()))
        for slug, loop in self._pulls.items():
            most = window(slots.get(slug, 0), carriers, self._deps.settings.window) if allowed else 0
            wanted = max(0, most - self._held.count(slug))
            if loop.credit != wanted:
                loop.add_credit(wanted - loop.credit)

    def _slots(self) -> dict[str, int]:
        """Return the slots of the live workers of each model that is served here."""
        found: dict[str, int] = {}
        members = self._deps.ingress.members
        for pool in members.pools():
            slug = slug_of_pool(pool)
            slots = sum(max(1, member.slots) for member in members.serving_workers(pool))
            if slots and self._deps.renderer.serves(slug):
                found[slug] = found.get(slug, 0) + slots
        return found

    def _open(self, slug: str) -> None:
        spec = job_consumer(self._deps.subjects, slug)
        messaging = self._deps.messaging

        async def ensure() -> None:
            await messaging.ensure_consumer(spec)

        loop = messaging.pull(spec.stream, spec.name, lambda delivery: self._on_delivery(slug, delivery), on_missing=ensure)
        self._pulls[slug] = loop
        self._tasks.spawn(self._run(slug, loop))

    async def _run(self, slug: str, loop: PullLoop) -> None:
        spec = job_consumer(self._deps.subjects, slug)
        while True:
            try:
                await self._deps.messaging.ensure_consumer(spec)
                break
            except JetStreamError as error:
                log.warning("consumer.not_made", consumer=spec.name, error=str(error))
                await asyncio.sleep(ENSURE_RETRY_S)
        await loop.run()
