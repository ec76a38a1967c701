"""A simulated deployment: processes, one server, faults.

    world = World(seed=7)
    world.server.install(Topology(subjects=Subjects("hr")))
    world.process("W0", run_worker, restart=True)          # async def run_worker(machine: Machine) -> None
    world.schedule([Fault(2.5, "crash", "W0"), Fault(4.0, "outage")])
    world.run(70.0, stop=lambda: everything_settled())

A crash ends a process between two of its hops or callbacks: no `finally` block and no `except` runs, nothing more is sent.
What was sent before still arrives, except in a power cut.

A frozen process does nothing until it thaws; then its timers fire late, what was sent to it arrives, and what it was about to
send leaves.

`inject={k: "crash"}` puts one fault just before the k-th hop of the run, in the process whose hop that is ("crash+": shortly
after it); trying every k is an exhaustive search.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import ClassVar

from tests.simulation.virtual.faults import Fault
from tests.simulation.virtual.loop import Scheduler
from tests.simulation.virtual.machine import Machine, Main, Plan
from tests.simulation.virtual.network import Conn, Network, SimConfig
from tests.simulation.virtual.server import SimServer

FREEZES_S = (1.0, 2.4, 4.0, 8.0)
CUTS_S = (2.4, 4.0, 7.0)
OUTAGES_S = (1.0, 5.0)
LATER_S = 0.1  # "crash+" at a hop: this long after it
TRACE_LINES = 2000


class Violation(AssertionError):
    """A promise was broken in a simulated run.

    It ends the run of the open world also where the code under test catches it, as a guard around one message does.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        if World.open is not None:
            World.open.fail(self)


def _sizes(_subject: str, data: bytes, _headers: Mapping[str, str] | None) -> str:
    return f"{len(data)} bytes"


class World(Scheduler):
    """Everything that is simulated. Use it as a context manager, so that abandoned tasks are cleared away."""

    open: ClassVar[World | None] = None  # the one that runs

    def __init__(
        self, seed: int, config: SimConfig | None = None, *, inject: Mapping[int, str] | None = None, tracing: bool = False
    ) -> None:
        super().__init__(seed)
        self.seed = seed
        self.config = config or SimConfig()
        self.tracing = tracing
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self.steps = 0
        self.machines: list[Machine] = []
        self.server = SimServer(self, self.config)
        self.network = Network(self, self.config)
        self.describe: Callable[[str, bytes, Mapping[str, str] | None], str] = lambda _subject, data, _headers: (
            f"{len(data)} bytes"
        )
        self.fault_kinds: dict[str, Callable[[Machine, float | None], object]] = {
            "crash": lambda machine, _: self.crash(machine),
            "powercut": lambda machine, _: self.crash(machine, lose_sent=True),
            "freeze": self.freeze,
            "cut": lambda machine, length: self.cut(machine, length or self.rng.choice(CUTS_S)),
            "gap": lambda machine, length: self.cut(machine, length or self.rng.random()),
            "outage": lambda _, length: self.outage(length),
        }
        self._inject = dict(inject or {})
        self._failure: BaseException | None = None
        self._closed = False

    def __enter__(self) -> World:
        World.open = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        World.open = None
        self.close()

    # processes ---------------------------------------------------------------------------------------------------------------
    def process(self, name: str, main: Main, *, restart: bool = False, restart_on_exit: bool = False) -> None:
        """Run `main` as a process from the start of the world. `restart`: a new incarnation follows a crash."""
        self.at(self.rng.random() * self.config.start_spread_s, self._spawn, name, Plan(main, restart, restart_on_exit))

    def newest(self, name: str) -> Machine | None:
        """The latest incarnation of a process."""
        return next((m for m in reversed(self.machines) if m.name == name), None)

    def living(self, prefix: str = "") -> list[Machine]:
        return [m for m in self.machines if m.alive and m.name.startswith(prefix)]

    def _spawn(self, name: str, plan: Plan) -> None:
        if not self.server.up:  # a supervisor would try again
            self.at(0.5, self._spawn, name, plan)
            return
        machine = Machine(self, name, sum(m.name == name for m in self.machines), plan)
        self.machines.append(machine)
        self.log("start", machine.id)
        machine.start()

    def _respawn(self, machine: Machine) -> None:
        low, high = self.config.restart_s
        self.at(low + self.rng.random() * (high - low), self._spawn, machine.name, machine.plan)

    def exited(self, machine: Machine) -> None:
        """The main coroutine of a process has returned."""
        if machine.frozen:
            machine.held.append(lambda: self.exited(machine))
            return
        self.log("exit", machine.id)
        self._end(machine)
        if machine.plan.restart_on_exit:
            self._respawn(machine)

    def _end(self, machine: Machine, *, lose_sent: bool = False) -> None:
        machine.alive = False
        machine.held.clear()
        machine.loop.pause()
        for messaging in machine.conns.values():
            self._break(messaging.conn, lose_sent=lose_sent)

    # faults ------------------------------------------------------------------------------------------------------------------
    def schedule(self, faults: Iterable[Fault]) -> None:
        """Let faults happen. A name stands for the newest incarnation of that process at the time."""
        for fault in faults:
            self.at(max(0.0, fault.at_s - self.now), self._strike, fault)

    def random_faults(self, limit: int, kinds: Iterable[str], names: Iterable[str], *, horizon_s: float = 10.0) -> list[Fault]:
        """Up to `limit` faults, by the seed and by nothing else."""
        rng, kinds, names = random.Random(f"faults {self.seed}"), list(kinds), list(names)
        faults = [
            Fault(round(rng.random() * horizon_s, 2), rng.choice(kinds), rng.choice(names))
            for _ in range(rng.randint(0, limit))
        ]
        return sorted(faults, key=lambda f: (f.at_s, f.kind, f.who))

    def _strike(self, fault: Fault) -> None:
        machine = self.newest(fault.who)
        if machine is not None and machine.alive:
            self._apply(fault.kind, machine, fault.length_s)
        elif fault.kind == "outage":
            self.outage(fault.length_s)

    def _apply(self, kind: str, machine: Machine, length_s: float | None) -> None:
        self.log("FAULT", kind, machine.id)
        self.fault_kinds[kind](machine, length_s)

    def step(self, machine: Machine, what: str) -> None:
        """One hop of a process is about to happen."""
        self.steps += 1
        if self.tracing:
            self.log(f"[{self.steps}]", machine.id, what)
        if self._inject and (kind := self._inject.get(self.steps)) and not machine.frozen:
            if kind.endswith("+"):
                self.at(LATER_S, self._apply_later, kind[:-1], machine)
            else:
                self._apply(kind, machine, None)

    def _apply_later(self, kind: str, machine: Machine) -> None:
        if machine.alive:
            self._apply(kind, machine, None)

    def crash(self, machine: Machine, *, lose_sent: bool = False) -> None:
        """The process dies. What it has sent still arrives, unless `lose_sent`."""
        if machine.alive:
            self.log("CRASH", machine.id)
            self._end(machine, lose_sent=lose_sent)
            if machine.plan.restart:
                self._respawn(machine)

    def freeze(self, machine: Machine, length_s: float | None = None) -> None:
        if machine.alive and not machine.frozen:
            machine.frozen = True
            machine.loop.pause()
            self.at(length_s or self.rng.choice(FREEZES_S), self._thaw, machine)

    def _thaw(self, machine: Machine) -> None:
        if machine.alive:
            self.log("thaw", machine.id)
            machine.frozen = False
            held, machine.held = machine.held, []
            for action in held:
                action()
            if machine.alive and not machine.frozen:
                machine.loop.resume()

    def cut(self, machine: Machine, length_s: float) -> None:
        """No bytes between this process and the server for a while; its connections break."""
        if machine.alive and not machine.cut:
            machine.cut = True
            for messaging in machine.conns.values():
                self._break(messaging.conn)
            self.at(length_s, self._heal, machine)

    def _heal(self, machine: Machine) -> None:
        self.log("heal", machine.id)
        machine.cut = False

    def outage(self, length_s: float | None = None) -> None:
        """The server process dies and comes back: files survive, connections, pulls and memory streams do not."""
        if self.server.up:
            self.log("OUTAGE")
            self.server.stop()
            for machine in self.living():
                for messaging in machine.conns.values():
                    self._break(messaging.conn)
            self.at(length_s or self.rng.choice(OUTAGES_S), self._recover)

    def _recover(self) -> None:
        self.log("server is back")
        self.server.recover()

    # connections -------------------------------------------------------------------------------------------------------------
    def _break(self, conn: Conn, *, lose_sent: bool = True) -> None:
        """A connection dies. Both ends find out, each in its own time."""
        if not conn.link:
            return
        conn.link = False
        conn.epoch += 1
        if lose_sent:
            conn.sent_epoch += 1
        epoch = conn.epoch
        if (late := self.network.notice_s()) and self.server.up:
            self.at(late, lambda: self.server.detach(conn) if conn.epoch == epoch else None)
        else:
            self.server.detach(conn)
        if conn.machine.alive:
            self.at(self.network.notice_s(), conn.machine.loop.call_soon, self._lost, conn, epoch)

    def _lost(self, conn: Conn, epoch: int) -> None:
        """The client sees that its connection is gone."""
        if conn.epoch == epoch:
            self.log("disconnected", conn.id)
            conn.client_up = False
            for callback in list(conn.on_down):
                callback()
            self._retry(conn, epoch)

    def _retry(self, conn: Conn, epoch: int) -> None:
        if conn.epoch == epoch:
            wait = self.config.reconnect_s * (1 + self.rng.random())
            conn.machine.loop.call_later(wait, self._reconnect, conn, epoch)

    def _reconnect(self, conn: Conn, epoch: int) -> None:
        if conn.epoch != epoch:
            return
        if not self.server.up or conn.machine.cut:
            self._retry(conn, epoch)
            return
        self.server.attach(conn)
        self.log("reconnected", conn.id)
        for callback in list(conn.on_up):
            callback()

    # running -----------------------------------------------------------------------------------------------------------------
    def run(self, until_s: float, *, stop: Callable[[], bool] | None = None, every_s: float = 1.0) -> bool:
        """Run to virtual time `until_s`, or until `stop()`, asked every `every_s`, is true. Returns whether it was.

        Raises Violation, ProcessFailed and Livelock.
        """
        while True:
            self.advance(until_s if stop is None else min(until_s, self.now + every_s))
            if self._failure is not None:
                raise self._failure
            if stop is not None and stop():
                return True
            if self.now >= until_s:
                return False

    def fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        """End the run with this error."""
        if self._failure is None:
            error.__cause__ = cause
            self._failure = error
            self.log("FAILED", error)
        self.stop()

    def violation(self, text: str) -> None:
        """End the run: a promise was broken. For probes inside processes."""
        self.fail(Violation(text))

    def log(self, *what: object) -> None:
        if self.tracing:
            self.trace.append(f"{self.now:9.4f} " + " ".join(map(str, what)))

    def close(self) -> None:
        """Clear away what crashed and unfinished processes left behind."""
        if self._closed:
            return
        self._closed = True
        for machine in self.machines:
            machine.alive = False
        with self._virtual_environment():
            for machine in self.machines:
                machine.loop.bury()
