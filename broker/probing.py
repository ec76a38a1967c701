"""Noticing within half a second that a worker's process is gone, instead of when its lease has run out.

The server knows at once: a request on the control subject of a process whose connection is gone has no responder.  That is a
suspicion, never a verdict.  So all that is done about it is to take the worker's lease away, by compare-and-set, after a second
and a third look; what follows are the usual rules.  A worker that is alive after all finds its lease lost, fences itself,
gains a new one and asks its judges.

Members watch each other in a ring: each one probes the next two workers behind it, so the cost grows with the number of members
and not with its square; whoever watches may die as well, and then the lease runs out as ever.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right

import structlog

from broker import metrics
from broker.codec import encode
from broker.members import Members
from broker.messages import Ping
from jetstream.errors import JetStreamError, NoResponder, RevisionConflict
from jetstream.ports import Messaging
from jetstream.subjects import Subjects

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


class Prober:
    """One member of a pool, looking after others."""

    def __init__(self, messaging: Messaging, subjects: Subjects, members: Members, *, pool: str, me: str, ttl_s: float) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._members = members
        self._bucket = messaging.bucket(subjects.bucket("members"))
        self._pool = pool
        self._me = me
        self._ttl_s = ttl_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            if not self._settled:
                continue
            workers = set(self._members.workers(self._pool))
            names = watched(self._me, list(self._members.routers(self._pool)), workers)
            await asyncio.gather(*(self._look_after(name) for name in names))

    @property
    def _settled(self) -> bool:
        """Connected for so long that everybody else is back as well: a broker restart is no mass death."""
        now = asyncio.get_running_loop().time()
        return self._messaging.connected and now - self._messaging.connected_since_s >= self._ttl_s

    async def _look_after(self, worker: str) -> None:
        try:
            for look in range(LOOKS):
                if look:
                    await asyncio.sleep(AGAIN_S)
                if not await self._silent(worker):
                    return
            await self._revoke(worker)
        except JetStreamError as error:
            log.debug("probe.failed", worker=worker, error=str(error))

    async def _silent(self, worker: str) -> bool:
        """Nobody listens there. An answer that does not come is something else: that process may be slow, or stopped."""
        try:
            await self._messaging.request(self._subjects.control(worker), encode(Ping()), timeout_s=EVERY_S)
        except NoResponder:
            return True
        except JetStreamError:
            return False
        return False

    async def _revoke(self, worker: str) -> None:
        """Raises JetStreamError."""
        key = self._subjects.worker_key(self._pool, worker)
        entry = await self._bucket.get(key)
        if entry is None or not self._settled or not await self._silent(worker):
            return
        try:
            await self._bucket.delete(key, revision=entry.revision)
        except RevisionConflict:
            return  # it has just been renewed
        metrics.LEASES_REVOKED.inc()
        log.warning("lease.revoked", worker=worker, pool=self._pool, why="nobody listens on its control subject")
