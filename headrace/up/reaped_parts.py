"""Hands the processes that `headrace up` has reaped to `headrace/up/reaped_parts.py`.

That module needs the NATS client, which takes a while to import.  So it is imported in a thread when the deployment answers, or
when the first part has died, whichever comes first.
"""

from __future__ import annotations

import asyncio
import socket
from importlib import import_module

import structlog

from headrace.base.errors import SettingsError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages.requests import Count, Record, UnixTime
from headrace.config.build_settings import connect_options, subjects
from headrace.config.settings import Settings
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Bucket, Change, Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.up.nats_part import NatsPart
from headrace.up.parts import Reaped
from headrace.up.restart_policy import first_of

# Revokes the leases of the processes that `headrace up` has just reaped: workers, routers, the frontend.
#
# The failure detector (`broker/membership/failure_detector.py`) or the lapse of the lease would show the death later. Only
# the leases of the very process that was reaped are revoked (a router has one in each pool); then the usual rules of a lost
# member apply. Workers place requests and move work by themselves only where no router is, so a dead router must not stay in
# view.
#
# A connection of its own watches the leases, so that the supervisor knows the keys of its parts before it needs them: when a
# part dies together with the nats-server, its lease may have run out by the time the server is back. Then its deletion is
# written all the same, because others would take a lease that is merely absent for one that may come back.

_log = structlog.get_logger()

_RETRY_S = 0.1
_CONNECT_AGAIN_S = 0.5
_GIVE_UP_S = 60.0  # by then other members have seen the lease run out long ago
_KNOWN = 1024  # leases of this machine that are remembered


class LeaseHolder(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The process that holds a lease, as the values of all leases name it."""

    host: str = ""
    pid: Count = 0
    started: UnixTime = 0.0


class KnownLeases:
    """The leases of the processes of this machine, also of those whose lease has run out meanwhile."""

    def __init__(self) -> None:
        self._host = socket.gethostname()
        self._holders: dict[str, LeaseHolder] = {}  # by key, the longest unchanged first

    def on_change(self, change: Change) -> None:
        """Remember the lease of a process of this machine."""
        if change.value is not None:
            self.learn(change.key, change.value)

    def learn(self, key: str, value: bytes) -> None:
        """Remember the lease if a process of this machine holds it."""
        try:
            holder = decode(LeaseHolder, value)
        except WireError:
            return
        if holder.host != self._host or not holder.pid:
            return
        self._holders.pop(key, None)
        self._holders[key] = holder
        while len(self._holders) > _KNOWN:
            del self._holders[next(iter(self._holders))]

    def keys_of(self, reaped: Reaped) -> list[str]:
        """Return the keys of a reaped process, none if they are not known: it may never have had a lease."""
        return [
            key
            for key, holder in self._holders.items()
            if holder.pid == reaped.pid and holder.started >= reaped.started  # else an earlier process of that number
        ]


async def revoke_leases(options: ConnectOptions, names: Subjects, reaped: asyncio.Queue[Reaped]) -> None:
    """Revoke the leases of each process that comes out of the queue, until cancelled.

    While the server is away the connection is tried again; what was reaped then is revoked when it is back.
    """
    known = KnownLeases()
    async with await _connected(options, names, reaped) as connection, TaskScope() as tasks:
        tasks.spawn(connection.bucket(names.bucket("members")).watch(known.on_change, ">").run())
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
    """Revoke the leases of a reaped process, and try again while the server is away. Return True when there was one."""
    last = ""
    try:
        async with asyncio.timeout(_GIVE_UP_S):
            while True:
                try:
                    return await revoke_all(messaging, names, known, reaped)
                except JetStreamError as error:  # a conflict, too: a renewal was still on its way
                    last = str(error)
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        _log.warning("lease.left", pid=reaped.pid, error=last)
        return False


async def revoke_all(messaging: Messaging, names: Subjects, known: KnownLeases, reaped: Reaped) -> bool:
    """Revoke the leases of a reaped process. Return True when there was one. Raises JetStreamError, and can be tried again."""
    bucket = messaging.bucket(names.bucket("members"))
    if not known.keys_of(reaped):  # it registered just now, or before the watch had begun
        for lease in await bucket.entries(">"):
            known.learn(lease.key, lease.value)
    revoked = [await _revoke(bucket, key) for key in known.keys_of(reaped)]
    return any(revoked)


async def _revoke(bucket: Bucket, key: str) -> bool:
    entry = await bucket.get(key)
    if entry is not None:
        await bucket.delete(key, revision=entry.revision)
    elif await bucket.state(key) == "deleted":
        return False  # by another member, or its holder has released it itself
    else:
        await bucket.delete(key)
    _log.warning("lease.revoked", **_named(key), why="its process has ended")
    return True


def _named(key: str) -> dict[str, str]:
    kind, *pool, holder = key.split(".", 2)
    return {kind: holder, **({"pool": pool[0]} if pool else {})}


_WAITING = 256  # processes whose leases wait to be revoked; more die only while the server is away for long


class ReapedParts:
    """The processes that ended badly and whose leases are still to be revoked."""

    def __init__(self, settings: Settings, nats: NatsPart) -> None:
        self._settings = settings
        self._nats = nats
        self._queue: asyncio.Queue[Reaped] = asyncio.Queue(_WAITING)
        self._some = asyncio.Event()

    def add(self, reaped: Reaped) -> None:
        """Have the lease of this process revoked as soon as the server can be reached."""
        try:
            self._queue.put_nowait(reaped)
        except asyncio.QueueFull:
            _log.warning("lease.left", pid=reaped.pid, error=f"{_WAITING} others wait to be revoked")
        self._some.set()

    async def run(self, answering: asyncio.Event) -> None:
        """Revoke leases until cancelled. `answering`: the deployment serves, so there is time for an import."""
        await first_of(answering, self._some, timeout_s=None)
        await asyncio.to_thread(import_module, "headrace.up.reaped_parts")

        try:
            options = connect_options(self._nats.as_operator(self._settings), name="headrace up")
        except SettingsError as error:  # its file is gone since the start
            _log.warning("leases.left", error=str(error))
            return
        await revoke_leases(options, subjects(self._settings), self._queue)
