"""Revokes the lease of a worker process that `headrace up` has just reaped.

The failure detector (`broker/membership/failure_detector.py`) or the lapse of the lease would show the death later.  Only the
lease of the very process that was reaped is revoked, by compare-and-set; then the usual rules of a lost worker apply.
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
    """Revoke the lease of the reaped process `pid` of this machine, which started at Unix time `started` or later.

    Never raises for what the server does. Returns True when there was a lease and it is gone.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async with await Connection.connect(options, subjects=names) as connection:
                return await revoke_lease(connection, names, pid=pid, started=started)
    except (JetStreamError, TimeoutError) as error:
        _log.info("lease.left", pid=pid, error=str(error) or type(error).__name__)
        return False


async def revoke_lease(messaging: Messaging, names: Subjects, *, pid: int, started: float) -> bool:
    """Revoke the lease over an open connection. Returns True when there was one. Raises JetStreamError."""
    bucket = messaging.bucket(names.bucket("members"))
    for entry in await bucket.entries("worker.>"):
        member = _member(entry)
        if member is None or (member.host, member.pid) != (socket.gethostname(), pid) or member.started < started:
            continue
        try:
            await bucket.delete(entry.key, revision=entry.revision)
        except RevisionConflict:
            return False  # a renewal was still on its way, or another process has revoked it
        _log.warning("lease.revoked", worker=member.worker, pool=member.pool, why="its process has ended")
        return True
    return False


def _member(entry: Entry) -> WorkerMember | None:
    try:
        return decode(WorkerMember, entry.value)
    except WireError:
        return None
