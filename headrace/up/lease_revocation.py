"""`headrace up` knows the moment one of its workers has ended, and says so: it takes that worker's lease away.

Others would notice too, by asking (`broker/membership/failure_detector.py`) or when the lease has run out.  Only the
lease of the very process that
was reaped goes, by compare-and-set; what follows are the usual rules of a worker that is gone.
"""

from __future__ import annotations

import asyncio
import socket

import structlog

from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import WorkerMember
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.errors import JetStreamError, RevisionConflict
from headrace.jetstream.ports import Entry, Messaging
from headrace.jetstream.subjects import Subjects

_log = structlog.get_logger()

_TIMEOUT_S = 3.0  # by then its lease has nearly run out


async def announce_death(options: ConnectOptions, names: Subjects, *, pid: int, started: float) -> bool:
    """Take away the lease of the process `pid` of this machine, started at Unix time `started` or later, which has been reaped.

    Never raises for what the server does. True when there was a lease and it is gone.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async with await Connection.connect(options, subjects=names) as connection:
                return await revoke_lease(connection, names, pid=pid, started=started)
    except (JetStreamError, TimeoutError) as error:
        _log.info("lease.left", pid=pid, error=str(error) or type(error).__name__)
        return False


async def revoke_lease(messaging: Messaging, names: Subjects, *, pid: int, started: float) -> bool:
    """The same over a connection that is there. Raises JetStreamError."""
    bucket = messaging.bucket(names.bucket("members"))
    for entry in await bucket.entries("worker.>"):
        member = _member(entry)
        if member is None or (member.host, member.pid) != (socket.gethostname(), pid) or member.started < started:
            continue
        try:
            await bucket.delete(entry.key, revision=entry.revision)
        except RevisionConflict:
            return False  # a renewal was still on its way, or somebody else has noticed
        _log.warning("lease.revoked", worker=member.worker, pool=member.pool, why="its process has ended")
        return True
    return False


def _member(entry: Entry) -> WorkerMember | None:
    try:
        return decode(WorkerMember, entry.value)
    except WireError:
        return None
