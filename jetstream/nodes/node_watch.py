"""Leaves a server of a cluster that no longer reaches the others, or that stands still.

A server that a partition has left in the minority keeps its clients and answers their pings, but stores nothing and passes
nothing on. One that is frozen holds its connections open for many seconds. In both cases the other servers go on without it.

So a client that knows several servers holds a second connection, to another one, and sends itself small messages by way of
both. When they do not arrive, when its own server answers no ping, or when nothing is stored, it asks all other servers, and
goes to one of them if more of them are alive and not reached than there are servers on its own side. During an election
nothing is stored either, and no server is left for that.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import structlog

from headrace.jetstream import metrics
from headrace.jetstream.core import wire
from headrace.jetstream.core.raw_client import CoreClient
from headrace.jetstream.dial import abandon
from headrace.jetstream.nodes.probes import Probes
from headrace.jetstream.nodes.standby import DIAL_S, Standby, arrives, dial_one
from headrace.jetstream.nodes.suspicion import STILL_S, Suspicion, is_cut_off
from headrace.jetstream.tasks import TaskScope

if TYPE_CHECKING:
    from headrace.jetstream.context import ConnectOptions
    from headrace.jetstream.core.publish import Mux

log = structlog.get_logger(__name__)

LOOK_S = 0.1
PROBE_S = 0.2
LATE_S = 0.2  # of this process: answers may wait to be read
DENIED_AFTER = 5  # probes that do not even arrive at the own server: the login may not send them


class NodeWatch:
    """Watches the server of a connection that knows several, and moves it to another one."""

    def __init__(self, core: CoreClient, mux: Mux, options: ConnectOptions, inbox: str) -> None:
        self._core = core
        self._mux = mux
        self._options = options
        self._subject = f"{inbox}.reach"
        self._suspicion = Suspicion()
        self._probes = Probes()
        self._standby = Standby(options, self._subject, self._on_arrival)
        self._next_probe_s = 0.0
        self._unheard = 0  # probes in a row that have not arrived at the own server
        self._heard = False  # that any did
        self._was_up = True
        self._tasks = TaskScope()
        self._check: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Watch until cancelled."""
        self._core.tap(self._subject, self._on_own_arrival)
        async with self._tasks:
            self._tasks.spawn(self._standby.run(self._others, self._probes.other_changed))
            looks_at = self._loop.time()
            while True:
                looks_at += LOOK_S
                await asyncio.sleep(max(0.0, looks_at - self._loop.time()))
                now = self._loop.time()
                if now - looks_at < LATE_S:
                    self._look(now)
                else:
                    looks_at = now

    def _others(self) -> list[str]:
        """Return the addresses of the other servers."""
        here = self._here()
        return [url for url in dict.fromkeys(self._options.servers) if _netloc(url) != here]

    def _here(self) -> str:
        return self._core.connected_url.netloc if self._core.connected_url else ""

    def _look(self, now: float) -> None:
        if not self._core.up:
            if self._was_up:
                self._probes.own_changed()
            self._was_up = False
            return
        self._was_up = True
        self._mux.repeat_unanswered(now)
        if now >= self._next_probe_s:
            self._next_probe_s = now + PROBE_S
            self._probe(now)
        if self._check is not None and not self._check.done():
            return
        if self._standby.up and (_netloc(self._standby.url) == self._here() or self._probes.other_still_s(now) > 2 * STILL_S):
            self._standby.leave()
        found = {
            "still_s": self._probes.still_s(now),
            "lost_s": self._probes.lost_s(now),
            "silent_s": self._mux.unanswered_s(now),
        }
        if self._suspicion.due(now, **found):
            log.info("connection.checked", server=self._here(), **{k: round(v, 2) for k, v in found.items()})
            self._check = self._tasks.spawn(self._ask_others())

    # Probes:

    @property
    def _denied(self) -> bool:
        return not self._heard and self._unheard >= DENIED_AFTER

    def _probe(self, now: float) -> None:
        number = self._probes.send(now)
        if not self._denied:
            self._unheard += 1
            self._core.send_now(wire.pub(self._subject, b"%d" % number))
        self._core.ping(lambda: self._probes.own_answered(number))
        if self._denied or not self._standby.up:
            self._probes.other_changed()
        elif self._standby.core is not None:
            self._standby.core.ping(lambda: self._probes.other_answered(number))

    def _on_own_arrival(self, *_message: object) -> None:
        self._heard = True
        self._unheard = 0

    def _on_arrival(self, data: bytes) -> None:
        if data.isdigit():
            self._probes.arrived(int(data))

    # Checks:

    async def _ask_others(self) -> None:
        """Find out which other servers messages reach, and move if this server is cut off from most of them."""
        here, began = self._here(), self._loop.time()
        asked = {self._tasks.spawn(self._reaches(url)): url for url in self._others()}
        reached: dict[str, bool | None] = {}
        left: set[asyncio.Task[bool | None]] = set(asked)
        verdict: bool | None = None
        answers = True
        try:
            while left and verdict is None:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                reached |= {asked[task]: task.result() for task in done}
                answers = self._probes.still_s(self._loop.time()) < STILL_S
                verdict = is_cut_off(reached, answers=answers, open_=len(left))
        finally:
            for task in left:
                task.cancel()
        # A login that may not send there does not even reach itself.
        if not verdict or not self._core.up or (answers and not self._heard) or self._here() != here:
            self._suspicion.cleared(self._loop.time(), random.random())  # noqa: S311  # no secret
            if reached.get(self._standby.url) is not True and self._standby.up:
                self._standby.leave()  # it is that server which is cut off
            return
        metrics.NODES_LEFT.inc()
        why = "it is cut off from the others" if answers else "it stands still"
        log.warning("connection.moved", server=here, why=why, checked_s=round(self._loop.time() - began, 2))
        await self._move([url for url, arrived in reached.items() if arrived is False])

    async def _reaches(self, url: str) -> bool | None:
        """Return whether messages to this connection's server arrive at another one, None if that is not alive."""
        if self._standby.url == url and self._standby.core is not None:
            return await arrives(self._core, self._standby.core, self._subject)
        other = await dial_one(self._options, url)
        if other is None:
            return None
        try:
            arrived = await arrives(self._core, other, self._subject)
        except BaseException:
            await abandon(other)
            raise
        self._tasks.spawn(abandon(other))  # its end is not waited for
        return arrived

    async def _move(self, targets: list[str]) -> None:
        """Connect to one of these, and know all servers again soon."""
        self._suspicion.moved(self._loop.time())
        self._loop.call_later(2 * DIAL_S, self._know_all)
        await self._core.leave(targets)

    def _know_all(self) -> None:
        if not self._core.is_closed:
            self._core.set_server_pool(list(self._options.servers))


def _netloc(url: str) -> str:
    return urlparse(url if "://" in url else f"nats://{url}").netloc
