"""Hands the processes that `headrace up` has reaped to `headrace/up/lease_revocation.py`.

That module needs the NATS client, which takes a while to import.  So it is imported in a thread when the deployment answers, or
when the first part has died, whichever comes first.
"""

from __future__ import annotations

import asyncio
from importlib import import_module

import structlog

from headrace.base.errors import SettingsError
from headrace.config.build_settings import connect_options, subjects
from headrace.config.settings import Settings
from headrace.up.managed_process import first_of
from headrace.up.nats_part import NatsPart
from headrace.up.parts import Reaped

_log = structlog.get_logger()

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
        await asyncio.to_thread(import_module, "headrace.up.lease_revocation")
        from headrace.up.lease_revocation import revoke_leases

        try:
            options = connect_options(self._nats.as_operator(self._settings), name="headrace up")
        except SettingsError as error:  # its file is gone since the start
            _log.warning("leases.left", error=str(error))
            return
        await revoke_leases(options, subjects(self._settings), self._queue)
