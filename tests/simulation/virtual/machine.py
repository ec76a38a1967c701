"""One incarnation of one simulated process: its event loop, its connections, its fate."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.jetstream.ports import Message
from tests.simulation.virtual.faults import ProcessFailed
from tests.simulation.virtual.loop import EPOCH_S, VirtualLoop
from tests.simulation.virtual.messaging import SimMessaging
from tests.simulation.virtual.network import Conn

if TYPE_CHECKING:
    from tests.simulation.virtual.world import World


Main = Callable[["Machine"], Awaitable[object]]


class Machine:
    """One incarnation of one simulated process: its event loop, its connections, its fate."""

    def __init__(self, world: World, name: str, incarnation: int, plan: Plan) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.plan = plan
        self.alive = True
        self.frozen = False
        self.cut = False
        self.held: list[Callable[[], None]] = []
        self.rng = random.Random(world.rng.getrandbits(64))
        self.loop = VirtualLoop(world, f"{name}.{incarnation}")
        self.loop.set_exception_handler(self._unhandled)
        self.conns: dict[str, SimMessaging] = {}
        self.messaging = self.connect()

    @property
    def id(self) -> str:
        """Unique per process start."""
        return f"{self.name}-{self.incarnation}"

    def wall(self) -> float:
        """Unix time. (Code that keeps `time.time` as a default argument has kept the real one.)"""
        return EPOCH_S + self.world.now

    def connect(self) -> SimMessaging:
        """One more connection to the server, made at once."""
        conn = Conn(self, len(self.conns))
        self.world.server.attach(conn)
        messaging = self.conns[conn.id] = SimMessaging(conn)
        return messaging

    def answer(self, conn: Conn, message: Message) -> None:
        self.conns[conn.id].answer(message)

    def crash(self) -> None:
        """Called by the process itself: it dies here (what follows in the same callback has no effect any more)."""
        if self.frozen:
            self.held.append(lambda: self.world.crash(self))
        else:
            self.world.crash(self)

    def note(self, *what: object) -> None:
        """A line for the trace."""
        if self.alive:
            self.world.log(self.id, *what)

    def start(self) -> None:
        self.loop.call_soon(self._start)

    def _start(self) -> None:
        self.loop.create_task(self._main(), name=f"main of {self.id}")

    async def _main(self) -> None:
        try:
            await self.plan.main(self)
        except Exception as error:
            self.world.fail(ProcessFailed(f"{self.id} raised {error!r}"), error)
        else:
            self.world.exited(self)

    def _unhandled(self, _loop: object, context: Mapping[str, Any]) -> None:
        if self.alive:
            error = context.get("exception")
            self.world.fail(ProcessFailed(f"{self.id}: {context.get('message')}: {error!r}"), error)


@dataclass(slots=True)
class Plan:
    """How a process is started again."""

    main: Main
    restart: bool
    restart_on_exit: bool
