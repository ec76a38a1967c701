"""Opens the first connection of a process that may start before its server, or before JetStream is enabled there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.errors import AccessDenied, JetStreamDisabled, ServerUnreachable
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger(__name__)

RETRY_S = 0.5
REMIND_S = 10.0
DENIALS = 4  # refusals in a row after waiting: a server that reloads its configuration refuses every login


async def connect_patiently(
    options: ConnectOptions, *, subjects: Subjects, timeout_s: float, on_waiting: Callable[[str], None] | None = None
) -> Connection:
    """Wait up to `timeout_s` for a server that does not answer, and without limit for one that runs without JetStream.

    An operator may enable JetStream later without restarting this process. `on_waiting(reason)` is called at each failed try.

    Raises ServerUnreachable after that time, and every other ConnectError at once.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    told, told_s = "", 0.0
    denied = 0
    while True:
        try:
            return await Connection.connect(options, subjects=subjects)
        except (ServerUnreachable, JetStreamDisabled, AccessDenied) as error:
            denied = denied + 1 if isinstance(error, AccessDenied) else 0
            if (isinstance(error, ServerUnreachable) and loop.time() >= deadline) or (
                denied and (not told or denied > DENIALS)
            ):
                raise
            reason = str(error)
        if reason != told or loop.time() - told_s >= REMIND_S:
            told, told_s = reason, loop.time()
            log.warning("broker.waiting", reason=reason)
        if on_waiting is not None:
            on_waiting(reason)
        await asyncio.sleep(RETRY_S)
