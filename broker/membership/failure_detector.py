"""Noticing within half a second that a worker's process is gone, instead of when its lease has run out.

The server knows at once: a request on the control subject of a process whose connection is gone has no responder.  That is a
suspicion, never a verdict.  So all that is done about it is to take the worker's lease away, by compare-and-set, after a second
and a third look; what follows are the usual rules.  A worker that is alive after all finds its lease lost, fences itself,
gains a new one and asks its judges.

Members watch each other in a ring: each one probes the next two workers behind it, so the cost grows with the number of members
and not with its square; whoever watches may die as well, and then the lease runs out as ever.

After a broker restart everybody is back at another time, and who is not back yet is not gone.  So a member suspects only those
that have answered it since its own (re)connect, or anybody once that is a lease's length ago.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right

import structlog

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.membership.members import Members
from headrace.broker.messages import Ping
from headrace.jetstream.errors import JetStreamError, NoResponder, RevisionConflict
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

EVERY_S = 0.25
AGAIN_S = 0.15  # between two looks at one that is suspected: a connection that broke is back by then
LOOKS = 3
WATCHED = 2


def watched(me: str, members: list[str], workers: set[str]) -> list[str]:
    """The workers that `me` probes: the next ones behind it in the ring of all members, itself left out."""
    ring = sorted({*members, *workers} - {me})
    at = bisect_right(ring, me)
    return [name for name in (*ring[at:], *ring[:at]) if name in workers][:WATCHED]


class FailureDetector:
    """One member of a pool, looking after others."""

    def __init__(self, messaging: Messaging, subjects: Subjects, members: Members, *, pool: str, me: str, ttl_s: float) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._members = members
        self._bucket = messaging.bucket(subjects.bucket("members"))
        self._pool = pool
        self._me = me
        self._ttl_s = ttl_s
        self._answered: dict[str, float] = {}  # worker → since when this process was connected as it answered

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            workers = set(self._members.workers(self._pool))
            names = watched(self._me, list(self._members.routers(self._pool)), workers)
            self._answered = {name: since_s for name, since_s in self._answered.items() if name in names}
            await asyncio.gather(*(self._look_after(name) for name in names))

    def _may_suspect(self, worker: str) -> bool:
        """It was back after the last outage, as far as this process has seen one: a broker restart is no mass death."""
        since_s = self._messaging.connected_since_s
        settled = asyncio.get_running_loop().time() - since_s >= self._ttl_s
        return self._messaging.connected and (settled or self._answered.get(worker) == since_s)

    async def _look_after(self, worker: str) -> None:
        try:
            for look in range(LOOKS):
                if look:
                    await asyncio.sleep(AGAIN_S)
                if not await self._silent(worker) or not self._may_suspect(worker):
                    return
            await self._revoke(worker)
        except JetStreamError as error:
            log.debug("probe.failed", worker=worker, error=str(error))

    async def _silent(self, worker: str) -> bool:
        """Nobody listens there. An answer that does not come is something else: that process may be slow, or stopped."""
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
        """Raises JetStreamError."""
        key = self._subjects.worker_key(self._pool, worker)
        entry = await self._bucket.get(key)
        if entry is None or not await self._silent(worker) or not self._may_suspect(worker):
            return
        try:
            await self._bucket.delete(key, revision=entry.revision)
        except RevisionConflict:
            return  # it has just been renewed
        metrics.LEASES_REVOKED.inc()
        log.warning("lease.revoked", worker=worker, pool=self._pool, why="nobody listens on its control subject")
