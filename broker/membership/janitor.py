"""Moves the jobs of dead workers to the live ones, from a periodic round over the work queue of a pool.

A worker that died without work leaves only its consumers.  Those of workers that the janitor has seen alive are deleted when
they die; those of workers that died before it began to act, together with the broker or a whole `headrace up`, it finds in the
list of consumers, which it reads once when it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
import xxhash

from headrace.broker import metrics
from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import Mover
from headrace.broker.settings import Timing
from headrace.jetstream.errors import JetStreamError, SubjectError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

MOST_STRANGE = 100  # subjects without a worker that are logged


def rendezvous_first(pool: str, candidates: list[str]) -> str | None:
    """Return the candidate with the highest hash, so that all processes agree on one without communication."""
    return max(candidates, key=lambda name: (xxhash.xxh3_64_intdigest(f"{pool}/{name}".encode()), name), default=None)


class Janitor:
    """Moves the jobs of dead workers once a second. It runs in every worker and router; `acts` decides when it may act."""

    def __init__(
        self, messaging: Messaging, subjects: Subjects, members: Members, mover: Mover, *, pool: str, timing: Timing
    ) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._members = members
        self._mover = mover
        self._pool = pool
        self._timing = timing
        self._wake = asyncio.Event()
        self._seen: set[str] = set()  # workers that were live in the last round, or have a consumer
        self._listed = False  # the consumers have been read since it began to act
        self._strange: set[str] = set()  # subjects that were logged

    def wake(self) -> None:
        """Start the next round now, because a lease has vanished."""
        self._wake.set()

    async def run(self, acts: Callable[[], bool]) -> None:
        """Do a round each `janitor_s`, and at `wake`, until cancelled. Rounds in which `acts()` is False move no work."""
        while True:
            try:
                async with asyncio.timeout(self._timing.janitor_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if not acts():
                self._seen = set(self._members.workers(self._pool))
                self._listed = False
                continue
            try:
                await self._round()
            except JetStreamError as error:
                log.warning("janitor.failed", pool=self._pool, error=str(error))

    async def _round(self) -> None:
        stream = self._subjects.stream("WORK")
        counts = await self._messaging.subject_counts(stream, self._subjects.work_filter(self._pool))
        placed = {worker for subject in counts if (worker := self._worker_of(subject)) is not None}
        if not self._listed:
            self._seen |= await self._with_consumer()
            self._listed = True
        live = set(self._members.workers(self._pool))
        # A worker that died without work has left no message, only its consumers.
        for worker in sorted(placed | (self._seen - live)):
            if self._members.worker_live(self._pool, worker) or not await self._members.worker_gone(self._pool, worker):
                continue
            moved = await self._mover.move_all(worker, died=True, reason="worker_gone")
            names = self._subjects
            for kind, own, reads in (
                ("WORK", names.work_consumer(worker), names.work(self._pool, worker)),
                ("PREFILL", names.prefill_consumer(self._pool, worker), names.prefill(self._pool, worker)),
            ):
                for consumer in {own, *await self._readers(kind, reads)}:
                    await self._messaging.delete_consumer(names.stream(kind), consumer)
            self._seen.discard(worker)
            if moved:
                log.warning("worker.work_moved", worker=worker, pool=self._pool, moved=moved)
        self._seen |= live

    async def _readers(self, kind: str, subject: str) -> set[str]:
        """Return the names of the consumers that read this subject, which may have a part that only the worker knew."""
        listed = await self._messaging.consumer_subjects(self._subjects.stream(kind))
        return {name for name, subjects in listed.items() if subject in subjects}

    async def _with_consumer(self) -> set[str]:
        """Return the workers of the pool that have a consumer of WORK, dead or alive. Raises JetStreamError."""
        consumers = await self._messaging.consumer_subjects(self._subjects.stream("WORK"))
        own = self._subjects.work_filter(self._pool).removesuffix("*")
        found = {self._worker_of(name) for names in consumers.values() for name in names if name.startswith(own)}
        return {worker for worker in found if worker is not None}

    def _worker_of(self, subject: str) -> str | None:
        """Return the worker that owns a subject of WORK. None if that can be no worker: nothing is read there, or ever will be.

        Such a message expires with its Nats-TTL, or with the stream's own limit. It must not keep the round from the others.
        """
        try:
            return self._subjects.parse_work(subject).worker
        except SubjectError as error:
            if subject not in self._strange and len(self._strange) < MOST_STRANGE:
                self._strange.add(subject)
                metrics.MALFORMED.labels("subject").inc()
                log.error("work.unknown_subject", pool=self._pool, error=str(error)[:300])
            return None
