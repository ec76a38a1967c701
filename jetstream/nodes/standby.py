"""Holds a second connection, to another server of the cluster, at which messages of the first one are awaited."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.jetstream.core import wire
from headrace.jetstream.core.natspy import errors as nats_errors
from headrace.jetstream.core.raw_client import CoreClient
from headrace.jetstream.dial import abandon, dial
from headrace.jetstream.errors import JetStreamError

if TYPE_CHECKING:
    from headrace.jetstream.context import ConnectOptions

DIAL_S = 1.0
REDIAL_S = 1.0
REACH_S = 0.3  # for messages from one server to another
EVERY_S = 0.05


async def dial_one(options: ConnectOptions, url: str) -> CoreClient | None:
    """Return a connection to one server that ends when it breaks, None if that is not alive."""
    try:
        async with asyncio.timeout(2 * DIAL_S):
            core = await dial(dataclasses.replace(options, servers=(url,), connect_timeout_s=DIAL_S))
    except (JetStreamError, TimeoutError, OSError):
        return None
    core.options["allow_reconnect"] = False
    core.mark_up()
    return core


async def arrives(sender: CoreClient, receiver: CoreClient, subject: str) -> bool | None:
    """Return whether messages pass from the server of one connection to that of another, None if that is not alive."""
    arrived = asyncio.Event()
    tap = receiver.tap(subject, lambda *_message: arrived.set())
    alive = asyncio.Event()
    try:
        with contextlib.suppress(TimeoutError, nats_errors.Error):
            await receiver.barrier(REACH_S)
        for _ in range(round(REACH_S / EVERY_S)):
            receiver.ping(alive.set)
            if sender.up:
                sender.send_now(wire.pub(subject, b""))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(arrived.wait(), EVERY_S)
                return True
        return False if alive.is_set() and receiver.up else None
    finally:
        receiver.untap(tap)


class Standby:
    """The second connection. It is to be at another server than the first, and begins anew when it breaks."""

    def __init__(self, options: ConnectOptions, subject: str, on_arrival: Callable[[bytes], None]) -> None:
        """`on_arrival` is called with each message of `subject` that arrives there."""
        self.url = ""
        self.core: CoreClient | None = None
        self._options = options
        self._subject = subject
        self._on_arrival = on_arrival
        self._shunned = ""
        self._ended = asyncio.Event()

    @property
    def up(self) -> bool:
        """True while it is connected."""
        return self.core is not None and self.core.up

    def leave(self) -> None:
        """End the connection, to begin at another server."""
        self._shunned = self.url
        self._ended.set()

    async def run(self, others: Callable[[], Sequence[str]], on_change: Callable[[], None]) -> None:
        """Be connected to one of `others` until cancelled. `on_change` is called when the server is another one."""
        while True:
            urls = list(others())
            url = random.choice([u for u in urls if u != self._shunned] or urls or [""])  # noqa: S311  # no secret
            self._shunned = ""
            core = await dial_one(self._options, url) if url else None
            if core is None:
                self._shunned = url
                await asyncio.sleep(REDIAL_S)
                continue
            try:
                self._ended.clear()
                core.on_down = self._ended.set
                core.tap(self._subject, lambda _subject, _reply, data, _headers: self._on_arrival(data))
                with contextlib.suppress(TimeoutError, nats_errors.Error):
                    await core.barrier(DIAL_S)  # the subscription is known there
                    await asyncio.sleep(REACH_S)  # and at the other servers
                    self.url, self.core = url, core
                    on_change()
                    await self._ended.wait()
            finally:
                self.url, self.core = "", None
                await abandon(core)
