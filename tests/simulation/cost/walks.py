"""Counts the modules on the ways through the system: `python -m tests.simulation.cost.walks` prints them as JSON.

One chat at a time is served by the processes of `tests/simulation/cost/deployment.py` in steady state.  A module is on a way if
a function of it is entered there.  The connection to NATS and the inside of the simulated engine are left out: the one is
simulated here, in place of the other stands the engine of a deployment.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest.mock import patch

from headrace.broker.batches.settings import BatchSettings
from headrace.broker.part_state import PartState
from headrace.config.options import PlannerSettings
from headrace.jetstream.topology import Topology
from headrace.planner.process import DesiredPage, PlannerProcess
from tests.simulation.batches.deployment import Deployment
from tests.simulation.cost import deployment as cost
from tests.simulation.cost.deployment import HEAD, SUBJECTS, Cost, Socket, chat
from tests.simulation.durable import deployment as durable
from tests.simulation.durable.deployment import DurableDeployment, DurableShape
from tests.simulation.durable.jobs import JobWish
from tests.simulation.virtual.loop import VirtualLoop
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM
from tests.simulation.virtual.world import World

TOKENS = 60  # several blocks, which are reported as they fill
STEP_S = 0.008  # less than a step of the engine
ENGINE = "workers.sim"
TICK_S = 2.0


@dataclass(frozen=True, slots=True)
class Event:
    """A process entered a function of a module, or said something to the server (`said`)."""

    at: float
    process: str
    module: str = ""
    function: str = ""
    said: str = ""


class Trace:
    """All that happens in the processes of a world, in order."""

    def __init__(self, world: World) -> None:
        self.events: list[Event] = []
        self._world = world
        step, run_batch = world.step, VirtualLoop.run_batch

        def noted(machine: Machine, what: str) -> None:
            self.say(machine.name, what)
            step(machine, what)

        def profiled(loop: VirtualLoop) -> int:
            self._process = loop.name.partition(".")[0]
            sys.setprofile(self._entered)
            try:
                return run_batch(loop)
            finally:
                sys.setprofile(None)

        self.patches = (patch.object(world, "step", noted), patch.object(VirtualLoop, "run_batch", profiled))

    def say(self, process: str, what: str) -> None:
        self.events.append(Event(self._world.now, process, said=what))

    def _entered(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            name: str = frame.f_globals.get("__name__", "")
            if name.startswith("headrace."):
                name = name.removeprefix("headrace.")
                self.events.append(Event(self._world.now, self._process, name, frame.f_code.co_name))


class WalkedCost(Cost):
    """The deployment with a planner, and a client that asks one chat after the other."""

    def trace(self) -> list[Event]:
        """Return the events from the last chat on, until after a tick of the planner."""
        self._bodies = [chat(number, TOKENS) for number in range(3)]
        self._trace = Trace(self.world)
        one = patch.object(cost, "CLIENTS", 1)
        clock = patch.object(time, "perf_counter", lambda: self.world.now)
        with cost._default_log(), self._trace.patches[0], self._trace.patches[1], self.world as world, clock, one:
            world.server.install(Topology(subjects=SUBJECTS))
            mains = {"frontend": self._frontend, "router": self._router, "worker": self._worker, "planner": self._planner}
            for name, main in mains.items():
                world.process(name, main)
            world.run(cost.FIRST_S)
            assert self._ask is not None
            world.at(0.0, self._ask.set)
            assert world.run(cost.LAST_S, stop=lambda: len(self.answered) == 3, every_s=0.01)
            world.run(world.now + 2 * TICK_S)
        events = self._trace.events
        return events[max(place for place, event in enumerate(events) if event.said == "ask") :]

    async def _client(self, connection: Any) -> None:
        socket = Socket()
        connection.connection_made(socket)
        while self._bodies:
            await asyncio.sleep(1.0)
            body = self._bodies.pop()
            self._trace.say("client", "ask")
            connection.data_received(HEAD % len(body) + body)
            answer = await socket.answer()
            self._trace.say("client", "answered")
            self.answered.append(answer)

    async def _planner(self, machine: Machine) -> None:
        settings = PlannerSettings(tick_s=TICK_S)
        process = PlannerProcess(machine.messaging, SUBJECTS, settings, DesiredPage(fresh_s=30.0), None)
        await process.run(PartState("planner"))


def _modules(events: list[Event], *processes: str) -> set[str]:
    return {event.module for event in events if event.module and event.process in processes and not _is_inside(event.module)}


def _is_inside(module: str) -> bool:
    return module.startswith(f"{ENGINE}.") and module != f"{ENGINE}.engine"


def _places(events: list[Event], process: str, begin: str) -> list[int]:
    return [place for place, event in enumerate(events) if event.process == process and event.said.startswith(begin)]


def chat_walks() -> dict[str, set[str]]:
    """Return the modules of each leg of a chat, of the chat as a whole, and of a tick of the planner."""
    events = WalkedCost().trace()
    (answered,) = _places(events, "client", "answered")
    requested = _places(events, "frontend", f"publish {SUBJECTS.prefix}.req.")[0]
    placed = _places(events, "router", f"publish {SUBJECTS.prefix}.work.")[0]
    given = (f"{ENGINE}.engine", "submit")
    engine = next(place for place, event in enumerate(events) if place > placed and (event.module, event.function) == given)
    frames = _places(events, "worker", f"send {SUBJECTS.prefix}.out.")
    stored = [place for place in _places(events, "worker", f"publish {SUBJECTS.prefix}.kv.") if place < answered][-1]
    token = _modules(events[frames[3] : frames[7]], "worker", "frontend")
    around = [max(place for place in frames if place < stored), min(place for place in frames if place > stored)]
    soon = [event for event in events[stored:] if event.at < events[stored].at + STEP_S]
    cache = _modules(events[around[0] : around[1]], "worker") - token
    return {
        "HTTP → REQ": _modules(events[:requested], "frontend"),
        "REQ → WORK": _modules(events[requested:placed], "router"),
        "WORK → engine": _modules(events[placed : engine + 1], "worker"),
        "token back": token - {f"{ENGINE}.engine"},
        "KV event → index": cache | _modules(soon, "router"),
        "planner tick": _modules([event for event in events[answered:] if event.at < events[answered].at + TICK_S], "planner"),
        "a chat, all legs": _modules(events[:answered], "frontend", "router", "worker"),
    }


def batch_walk() -> set[str]:
    """Return the modules that a line of a batch takes in the process that has the batch, while lines are being run."""
    world = World(seed=1, config=CALM)
    trace = Trace(world)
    with cost._default_log(), world, trace.patches[0], trace.patches[1]:
        deployment = Deployment(world, lines=12, settings=BatchSettings(window_lines=3), slow_s=0.05)
        deployment.build()
        assert world.run(60.0, stop=lambda: bool(deployment.heard), every_s=0.1)
    jobs = next(found for name in ("F0", "F1") if len(found := _jobs(trace.events, name)) > 8)
    return _modules(trace.events[jobs[3] : jobs[-1]], trace.events[jobs[0]].process)


def carrier_walk() -> set[str]:
    """Return the modules that a line of a batch, stored as a job, takes in the process that carries it."""
    world = World(seed=1, config=CALM)
    trace = Trace(world)
    with cost._default_log(), world, trace.patches[0], trace.patches[1]:
        wishes = tuple(JobWish(at_s=at, batch="b") for at in (8.0, 12.0))
        shape = DurableShape(jobs=wishes, carriers=1, workers=1, routers=1, unread=True)
        DurableDeployment(world, shape).build()
        world.run(16.0)
    prefix = durable.SUBJECTS.prefix
    begin = _places(trace.events, "K", f"publish {prefix}.job.")[-1]
    end = _places(trace.events, "J0", f"publish {prefix}.result.")[-1]
    return _modules(trace.events[begin:end], "J0")


def _jobs(events: list[Event], process: str) -> list[int]:
    return _places(events, process, f"publish {SUBJECTS.prefix}.job.")


def walks() -> dict[str, list[str]]:
    """Return the modules of each way, sorted."""
    found = chat_walks() | {"batch line": batch_walk() | carrier_walk()}
    return {name: sorted(modules) for name, modules in found.items()}


if __name__ == "__main__":
    print(json.dumps(walks()))
