"""The wires between simulated processes and the simulated server.

A connection has lanes: one for core messages, one per stream.  Inside a lane order is kept, as TCP keeps it; between lanes and
between connections anything may overtake anything.  A hop is one message going up (process to server) or down (server to
process); until the quiet time every hop may be lost, late or doubled.  A connection that breaks loses what was under way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headrace.jetstream.ports import Message

if TYPE_CHECKING:
    from tests.simulation.virtual.machine import Machine
    from tests.simulation.virtual.world import World

CORE = "core"  # the lane of core messages


@lru_cache(maxsize=65536)
def matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: `*` one token, `>` one or more."""
    wanted, got = pattern.split("."), subject.split(".")
    for i, token in enumerate(wanted):
        if token == ">":
            return len(got) > i
        if i >= len(got) or token not in ("*", got[i]):
            return False
    return len(wanted) == len(got)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """How the simulated network and server behave. Probabilities count until `quiet_at_s`, delays always."""

    delays_s: tuple[float, ...] = (0.001, 0.002, 0.01, 0.05)
    noise: float = 0.03  # chance of each hop to be lost, and to be late; of each core message to be doubled
    late_s: float = 1.5  # a late hop takes up to this
    quiet_at_s: float = 14.0
    silent: float = 0.2  # chance that an end of a broken connection notices only after up to `notice_s`
    notice_s: float = 3.0
    reconnect_s: float = 0.25  # between two attempts to reconnect, plus as much jitter
    dedupe: bool = True
    full: float = 0.0  # chance that a publish is refused as if its queue were full
    never_full: Callable[[str], bool] = field(default=lambda subject: ".re." in subject)
    watch_lags_s: tuple[float, ...] = (0.0, 0.2, 0.6)
    ttl_late_s: float = 0.25  # expiry comes up to this late
    start_spread_s: float = 0.05  # processes start within this
    restart_s: tuple[float, float] = (0.2, 3.2)  # a restarted process is back after this
    timeout_s: float = 2.0  # of a call to the server that names no timeout


# exact times, no faults of the network: for tests that compare with a real server
CALM = SimConfig(
    delays_s=(0.0005,), noise=0.0, silent=0.0, watch_lags_s=(0.0,), ttl_late_s=0.1, start_spread_s=0.0, reconnect_s=0.05
)


@dataclass(eq=False, slots=True)
class Sub:
    """A core subscription."""

    conn: Conn
    pattern: str
    queue: str
    on_message: Callable[[Message], None]


class Conn:
    """One connection of a process. Each end has its own belief about whether it is up."""

    __slots__ = (
        "client_up",
        "epoch",
        "id",
        "link",
        "machine",
        "on_down",
        "on_up",
        "sent_epoch",
        "server_up",
        "session",
        "since_s",
        "subs",
    )

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        self.id = f"{machine.name}-{machine.incarnation}-{number}"
        self.epoch = 0
        self.session = 0
        self.sent_epoch = 0
        self.link = self.client_up = self.server_up = True
        self.since_s = machine.world.now
        self.subs: list[Sub] = []
        self.on_up: list[Callable[[], None]] = []
        self.on_down: list[Callable[[], None]] = []


class Network:
    """Carries hops with the delays and faults of the configuration."""

    def __init__(self, world: World, config: SimConfig) -> None:
        self.world = world
        self.config = config
        self._last: dict[tuple[str, str, bool], float] = {}

    def lossy(self) -> bool:
        return self.config.noise > 0 and self.world.now < self.config.quiet_at_s and self.world.rng.random() < self.config.noise

    def delay_s(self) -> float:
        if self.lossy():
            return self.world.rng.random() * self.config.late_s
        delays = self.config.delays_s
        return delays[0] if len(delays) == 1 else delays[int(self.world.rng.random() * len(delays))]

    def notice_s(self) -> float:
        """How long an end of a broken connection does not know that it broke."""
        rng = self.world.rng
        return rng.random() * self.config.notice_s if self.config.silent and rng.random() < self.config.silent else 0.0

    def up(self, conn: Conn, lane: str, what: str, function: Callable[..., object], *args: Any, sure: bool = False) -> None:
        """From a process to the server, where `function` runs. `sure`: never lost by noise."""
        machine = conn.machine
        if not machine.alive:
            return
        self.world.step(machine, what)
        if machine.frozen:  # between two lines: what it was about to send leaves when it thaws
            machine.held.append(lambda: self._up(conn, lane, function, args, sure))
        elif machine.alive:
            self._up(conn, lane, function, args, sure)

    def _up(self, conn: Conn, lane: str, function: Callable[..., object], args: tuple[Any, ...], sure: bool) -> None:
        if not conn.link or (not sure and self.lossy()):
            return
        copies = 2 if lane is CORE and not sure and self.lossy() else 1
        for _ in range(copies):
            self.world.push(self._slot(conn.id, lane, True), (self._arrive_up, (conn, conn.sent_epoch, function, args)))

    def _arrive_up(self, conn: Conn, epoch: int, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        if conn.sent_epoch == epoch and self.world.server.up:
            function(*args)

    def down(
        self,
        conn: Conn,
        lane: str,
        what: str,
        function: Callable[..., object],
        *args: Any,
        sure: bool = False,
        lag_s: float = 0.0,
    ) -> None:
        """From the server to a process, on whose loop `function` runs."""
        if not conn.link or (not sure and self.lossy()):
            return
        when = self._slot(conn.id, lane, False, lag_s)
        self.world.push(when, (self._arrive_down, (conn, conn.epoch, what, function, args)))

    def _arrive_down(self, conn: Conn, epoch: int, what: str, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        machine = conn.machine
        if conn.epoch != epoch or not machine.alive:
            return
        if what:
            self.world.step(machine, what)
        if machine.alive:
            machine.loop.call_soon(function, *args)

    def _slot(self, one: str, other: str, upwards: bool, lag_s: float = 0.0) -> float:
        """When the next hop of this lane arrives: never before the one sent earlier."""
        key = (one, other, upwards)
        when = self.world.now + self.delay_s() + lag_s
        last = self._last.get(key, 0.0)
        if when < last:
            when = last
        self._last[key] = when
        return when


def headers_of(headers: Mapping[str, str] | None) -> dict[str, str]:
    return dict(headers) if headers else {}
