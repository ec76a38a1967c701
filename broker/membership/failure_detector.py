"""Detects within half a second that a worker's process is gone, before its lease expires.

The server knows at once: a request on the control subject of a process whose connection is gone has no responder.  That is a
suspicion, not a verdict.  So the detector only revokes the worker's lease, by compare-and-set, after a second and a third
probe; the usual rules do the rest.  A worker that is alive after all finds its lease lost, fences itself, gains a new lease and
asks its judges.

Members probe each other in a ring: each member probes the next two workers behind it, so the cost grows with the number of
members and not with its square.  If the probing member dies as well, the lease expires as usual.

After a broker restart the members reconnect at different times, and a worker that has not reconnected yet is not gone.  So a
member suspects only workers that have answered it since its own (re)connect, or any worker once that is a lease TTL ago.

A worker that is frozen or cut off keeps its connection.  Its lease runs out by itself; where a cluster of NATS servers keeps
the leases, and so they last longer, it is revoked when its renewals alone are missing.

Of a worker on its own machine a member knows more: whether the process is there.  If it is not, that needs no probes and no
settling: its lease is deleted also when it has run out already, or was forgotten by a server that was restarted.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right

import structlog

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.membership.members import Members, machine_id, process_gone
from headrace.broker.messages.control import Ping
from headrace.jetstream.errors import JetStreamError, NoResponder, RevisionConflict
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

EVERY_S = 0.25  # between two rounds of probes, and the longest wait for an answer
AGAIN_S = 0.15  # between two probes of a suspected worker: a connection that broke is back by then
PROBES = 3  # without an answer before the lease is revoked
WATCHED = 2  # workers that a member probes


def watched(me: str, members: list[str], workers: set[str]) -> list[str]:
    """Return the workers that `me` probes: the next `WATCHED` ones behind it in the ring of all other members."""
    ring = sorted({*members, *workers} - {me})
    at = bisect_right(ring, me)
    return [name for name in (*ring[at:], *ring[:at]) if name in workers][:WATCHED]


class FailureDetector:
    """Probes the workers that one member of a pool watches, and revokes the leases of those that are gone."""

    def __init__(self, messaging: Messaging, subjects: Subjects, members: Members, *, pool: str, me: str, ttl_s: float) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._members = members
        self._bucket = messaging.bucket(subjects.bucket("members"))
        self._pool = pool
        self._me = me
        self._ttl_s = ttl_s
        self._machine = machine_id()
        self._answered: dict[str, float] = {}  # worker → `connected_since_s` of this process when the worker last answered

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            workers = set(self._members.workers(self._pool))
            names = watched(self._me, list(self._members.routers(self._pool)), workers)
            self._answered = {name: since_s for name, since_s in self._answered.items() if name in names}
            await asyncio.gather(*(self._probe(name) for name in names))

    def _may_suspect(self, worker: str) -> bool:
        """Return True if the worker had reconnected after the last outage that this process has seen.

        Otherwise a broker restart would look like the death of all workers.
        """
        since_s = self._messaging.connected_since_s
        settled = asyncio.get_running_loop().time() - since_s >= self._ttl_s
        return self._messaging.connected and (settled or self._answered.get(worker) == since_s)

    async def _probe(self, worker: str) -> None:
        try:
            if self._has_ended(worker):
                await self._bury(worker)
                return
            if await self._overdue(worker):
                return
            for probe in range(PROBES):
                if probe:
                    await asyncio.sleep(AGAIN_S)
                if not await self._silent(worker) or not self._may_suspect(worker):
                    return
            await self._revoke(worker)
        except JetStreamError as error:
            log.debug("probe.failed", worker=worker, error=str(error))

    def _has_ended(self, worker: str) -> bool:
        member = self._members.workers(self._pool).get(worker)
        return member is not None and bool(self._machine) and member.machine == self._machine and process_gone(member.pid)

    async def _bury(self, worker: str) -> None:
        """Delete the lease of a worker whose process has ended, present or not. Raises JetStreamError."""
        key = self._subjects.worker_key(self._pool, worker)
        entry = await self._bucket.get(key)
        if entry is None and await self._bucket.state(key) == "deleted":
            return  # the watch is about to report it
        await self._bucket.delete(key, revision=entry.revision if entry is not None else None)
        self._note(worker, "its process has ended")

    def _note(self, worker: str, why: str) -> None:
        metrics.LEASES_REVOKED.inc()
        log.warning("lease.revoked", worker=worker, pool=self._pool, why=why)

    async def _overdue(self, worker: str) -> bool:
        """Revoke the lease of a worker that does not renew it although others do. Raises JetStreamError."""
        key = self._subjects.worker_key(self._pool, worker)
        if not (revision := self._members.overdue(key)):
            return False
        try:
            await self._bucket.delete(key, revision=revision)
        except RevisionConflict:
            return False  # it was renewed, which the watch is about to report
        self._note(worker, "it does not renew its lease")
        return True

    async def _silent(self, worker: str) -> bool:
        """Return True if no process listens on the worker's control subject.

        A missing answer is not enough: the process may be slow, or stopped.
        """
        since_s = self._messaging.connected_since_s
        try:
            await self._messaging.request(self._subjects.control(worker), encode(Ping()), timeout_s=EVERY_S)
        except NoResponder:
            return True
        except JetStreamError:
            return False
        self._answered[worker] = since_s
        return False

    async def _revoke(self, worker: str) -> None:
        """Delete the worker's lease, unless it answers now or has just renewed it. Raises JetStreamError."""
        key = self._subjects.worker_key(self._pool, worker)
        entry = await self._bucket.get(key)
        if entry is None or not await self._silent(worker) or not self._may_suspect(worker):
            return
        try:
            await self._bucket.delete(key, revision=entry.revision)
        except RevisionConflict:
            return  # the worker has just renewed it
        self._note(worker, "nobody listens on its control subject")
