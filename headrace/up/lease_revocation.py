"""Revokes the leases of worker processes that `headrace up` has just reaped.

The failure detector (`broker/membership/failure_detector.py`) or the lapse of the lease would show the death later.  Only the
lease of the very process that was reaped is revoked; then the usual rules of a lost worker apply.

A connection of its own watches the leases, so that the supervisor knows the key of each of its workers before it needs it: when
a worker dies together with the nats-server, its lease may have run out by the time the server is back.  Then its deletion is
written all the same, because others would take a lease that is merely absent for one that may come back.
"""

from __future__ import annotations

import asyncio
import socket

import structlog

from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import WorkerMember
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Change, Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.up.parts import Reaped

_log = structlog.get_logger()

_RETRY_S = 0.1
_CONNECT_AGAIN_S = 0.5
_GIVE_UP_S = 60.0  # by then other members have seen the lease run out long ago
_KNOWN = 1024  # workers of this machine whose keys are remembered


class KnownLeases:
    """The keys of the workers of this machine, also of those whose lease has run out meanwhile."""

    def __init__(self) -> None:
        self._host = socket.gethostname()
        self._keys: dict[int, tuple[str, float]] = {}  # process id → key, start

    def on_change(self, change: Change) -> None:
        """Remember the key of a worker of this machine."""
        if change.value is not None:
            self.learn(change.key, change.value)

    def learn(self, key: str, value: bytes) -> None:
        """Remember the key if its value, a lease, belongs to a worker of this machine."""
        try:
            member = decode(WorkerMember, value)
        except WireError:
            return
        if member.host != self._host or member.started < self._keys.get(member.pid, ("", 0.0))[1]:
            return
        self._keys.pop(member.pid, None)
        self._keys[member.pid] = (key, member.started)
        while len(self._keys) > _KNOWN:
            del self._keys[next(iter(self._keys))]

    def key_of(self, reaped: Reaped) -> str:
        """Return the key of a reaped process, empty if it is not known: it may never have had a lease."""
        key, started = self._keys.get(reaped.pid, ("", 0.0))
        return key if started >= reaped.started else ""  # else an earlier process of that number


async def revoke_leases(options: ConnectOptions, names: Subjects, reaped: asyncio.Queue[Reaped]) -> None:
    """Revoke the lease of each process that comes out of the queue, until cancelled.

    While the server is away the connection is tried again; what was reaped then is revoked when it is back.
    """
    known = KnownLeases()
    async with await _connected(options, names, reaped) as connection, TaskScope() as tasks:
        tasks.spawn(connection.bucket(names.bucket("members")).watch(known.on_change, "worker.>").run())
        while True:
            process = await reaped.get()
            tasks.spawn(revoke_patiently(connection, names, known, process))


async def _connected(options: ConnectOptions, names: Subjects, reaped: asyncio.Queue[Reaped]) -> Connection:
    """Return a connection once the server takes one, and say every minute without one that leases are not revoked meanwhile."""
    while True:
        last = ""
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                while True:
                    try:
                        return await Connection.connect(options, subjects=names)
                    except JetStreamError as error:
                        last = str(error)
                    await asyncio.sleep(_CONNECT_AGAIN_S)
        except TimeoutError:
            _log.warning("leases.not_watched", waiting=reaped.qsize(), waited_s=_GIVE_UP_S, error=last)


async def revoke_patiently(messaging: Messaging, names: Subjects, known: KnownLeases, reaped: Reaped) -> bool:
    """Revoke the lease of a reaped process, and try again while the server is away. Return True when there was a lease."""
    last = ""
    try:
        async with asyncio.timeout(_GIVE_UP_S):
            while True:
                try:
                    return await revoke_lease(messaging, names, known, reaped)
                except JetStreamError as error:  # a conflict, too: a renewal was still on its way
                    last = str(error)
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        _log.warning("lease.left", pid=reaped.pid, error=last)
        return False


async def revoke_lease(messaging: Messaging, names: Subjects, known: KnownLeases, reaped: Reaped) -> bool:
    """Revoke the lease of a reaped process. Return True when there was one. Raises JetStreamError."""
    bucket = messaging.bucket(names.bucket("members"))
    if not known.key_of(reaped):  # it registered just now, or before the watch had begun
        for lease in await bucket.entries("worker.>"):
            known.learn(lease.key, lease.value)
    key = known.key_of(reaped)
    if not key:
        return False
    entry = await bucket.get(key)
    if entry is not None:
        await bucket.delete(key, revision=entry.revision)
    elif await bucket.state(key) == "deleted":
        return False  # by another member, or the worker has released it itself
    else:
        await bucket.delete(key)
    _, pool, worker = key.split(".", 2)
    _log.warning("lease.revoked", worker=worker, pool=pool, why="its process has ended")
    return True
