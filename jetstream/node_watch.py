"""Leaves a server of a cluster that no longer reaches the others, or that stands still.

A server that a partition has left in the minority keeps its clients and answers their pings, but stores nothing and passes
nothing on. One that is frozen holds its connections open for many seconds. In both cases the other servers go on without it.

When the server answers no ping, or nothing about storing, the client asks the other servers of its setting for a second, short
connection each, and sends messages there by way of its own server. Its own server is cut off if more of the others are alive
and not reached than there are servers on its own side. During an election nothing is stored either, and no
server is left for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import structlog

from headrace.jetstream import metrics
from headrace.jetstream.core import wire
from headrace.jetstream.core.natspy import errors as nats_errors
from headrace.jetstream.core.raw_client import CoreClient
from headrace.jetstream.dial import abandon, dial
from headrace.jetstream.errors import JetStreamError

if TYPE_CHECKING:
    from headrace.jetstream.context import ConnectOptions
    from headrace.jetstream.core.publish import Mux

log = structlog.get_logger(__name__)

LOOK_S = 0.25
PING_S = 0.5
SILENT_S = 0.75  # without an answer; a call about a lease is given up after a second
DIAL_S = 1.0
REACH_S = 0.6  # for messages from one server to another
EVERY_S = 0.05
REST_MOST_S = 8.0  # between two checks that found nothing


class Suspicion:
    """Decides when the server is to be checked: by what has had no answer, and less and less often while nothing is found."""

    def __init__(self) -> None:
        self._rest_s = 0.0
        self._not_before = 0.0

    def due(self, now: float, *, silent_s: float) -> bool:
        """Return True if something has had no answer for so long that the server is to be checked now."""
        if silent_s < SILENT_S:
            if not silent_s and now >= self._not_before:
                self._rest_s = 0.0
            return False
        return now >= self._not_before

    def cleared(self, now: float, chance: float) -> None:
        """Note a check that found nothing. `chance`, between 0 and 1, keeps the clients of a cluster apart."""
        self._rest_s = min(max(2 * self._rest_s, 1.0), REST_MOST_S)
        self._not_before = now + self._rest_s * (0.5 + chance / 2)


def is_cut_off(reached: Mapping[str, bool | None], *, answers: bool) -> bool:
    """Return True if a server is on the smaller side of a cluster.

    `reached` has each other server: True if messages arrive there, False if it is alive and they do not, None if it is not
    alive. `answers`: the server itself answers pings.
    """
    beyond = sum(1 for arrived in reached.values() if arrived is False)
    near = sum(1 for arrived in reached.values() if arrived) + (1 if answers else 0)
    return beyond > near


class NodeWatch:
    """Watches the server of a connection that knows several, and moves it to another one."""

    def __init__(self, core: CoreClient, mux: Mux, options: ConnectOptions, inbox: str) -> None:
        self._core = core
        self._mux = mux
        self._options = options
        self._subject = f"{inbox}.reach"
        self._suspicion = Suspicion()
        self._pinged_s = 0.0  # time of the ping that has no answer yet
        self._next_ping_s = 0.0
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Watch until cancelled."""
        looks_at = self._loop.time()
        while True:
            looks_at += LOOK_S
            await asyncio.sleep(max(0.0, looks_at - self._loop.time()))
            now = self._loop.time()
            if not self._core.up:
                self._pinged_s = 0.0
            elif now - looks_at < LOOK_S:  # else this process stood still itself, and answers may wait to be read
                await self._look(now)
                now = self._loop.time()
            looks_at = now if now - looks_at >= LOOK_S else looks_at

    async def _look(self, now: float) -> None:
        unanswered_s = now - self._pinged_s if self._pinged_s else 0.0
        silent_s = max(self._mux.unanswered_s(now), unanswered_s)
        self._ping(now)
        if self._suspicion.due(now, silent_s=silent_s):
            await self._check(answers=unanswered_s < SILENT_S)

    def _ping(self, now: float) -> None:
        if not self._pinged_s and now >= self._next_ping_s:
            self._pinged_s, self._next_ping_s = now, now + PING_S
            self._core.ping(self._on_pong)

    def _on_pong(self) -> None:
        self._pinged_s = 0.0

    async def _check(self, *, answers: bool) -> None:
        """Find out which other servers messages reach, and move if this server is cut off from most of them."""
        here = self._core.connected_url.netloc if self._core.connected_url else ""
        others = [url for url in dict.fromkeys(self._options.servers) if _netloc(url) != here]
        own = asyncio.Event()
        tap = self._core.tap(self._subject, lambda *_message: own.set())
        try:
            found = await asyncio.gather(*(self._reaches(url) for url in others))
        finally:
            self._core.untap(tap)
        reached = dict(zip(others, found, strict=True))
        # A login that may not send there does not even reach itself.
        if not self._core.up or (answers and not own.is_set()) or not is_cut_off(reached, answers=answers):
            self._suspicion.cleared(self._loop.time(), random.random())  # noqa: S311  # no secret
            return
        metrics.NODES_LEFT.inc()
        beyond = [url for url, arrived in reached.items() if arrived is False]
        log.warning("connection.moved", server=here, why="it is cut off from the others" if answers else "it stands still")
        await self._move(beyond)

    async def _reaches(self, url: str) -> bool | None:
        """Return whether messages to this connection's server arrive at another one, None if that is not alive."""
        try:
            options = dataclasses.replace(self._options, servers=(url,), connect_timeout_s=DIAL_S)
            async with asyncio.timeout(2 * DIAL_S):
                other = await dial(options)
        except (JetStreamError, TimeoutError, OSError):
            return None
        try:
            other.mark_up()
            arrived = asyncio.Event()
            other.tap(self._subject, lambda *_message: arrived.set())
            with contextlib.suppress(nats_errors.Error):
                await other.barrier(DIAL_S)
            for _ in range(round(REACH_S / EVERY_S)):
                self._core.send_now(wire.pub(self._subject, b""))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(arrived.wait(), EVERY_S)
                    return True
            return False
        except TimeoutError:  # it took the connection and says nothing more
            return None
        finally:
            await abandon(other)

    async def _move(self, targets: list[str]) -> None:
        """Connect to one of these, and know all servers again soon."""
        self._core.set_server_pool(targets)
        self._loop.call_later(2 * DIAL_S, self._know_all)
        await self._core.force_reconnect()

    def _know_all(self) -> None:
        if not self._core.is_closed:
            self._core.set_server_pool(list(self._options.servers))


def _netloc(url: str) -> str:
    return urlparse(url if "://" in url else f"nats://{url}").netloc
