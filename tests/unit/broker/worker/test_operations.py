"""Operators' commands: refused before anything changes, done in one order, and undone where the engine fails."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from headrace.base.errors import HeadraceError
from headrace.broker.codec import decode
from headrace.broker.messages.control import Done, LoadAdapter
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.operator import CheckHealth, Operated, Pause, Resume, SetLogLevel, Sleep, Wake
from headrace.broker.worker.drain import Withdrawal
from headrace.broker.worker.operations import OperatorCommands, WorkerOperations
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.tasks import TaskScope
from tests.unit.broker.worker.test_state import state


class World:
    """An engine and a withdrawal that write down what is done with them. `fails`: what the engine cannot do."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.fails: dict[str, str] = {}
        self.state = WorkerState(WorkerMember(worker="w", pool="p", model="m", slots=4), slots=4, tombstone_s=1.0)

    def _note(self, what: str) -> dict[str, Any]:
        self.done.append(what)
        if what in self.fails:
            raise HeadraceError(self.fails[what])
        return {}

    def check(self, operation: str, *, level: int = 0) -> None:
        if operation in self.fails.get("check", ""):
            raise HeadraceError(f"cannot {operation}")

    async def health(self, *, canary: bool, timeout_s: float) -> tuple[bool, dict[str, Any]]:
        return True, {"canary": canary}

    async def sleep(self, level: int) -> dict[str, Any]:
        return self._note("sleep")

    async def wake(self, level: int) -> dict[str, Any]:
        return self._note("wake")

    async def pause(self) -> dict[str, Any]:
        return self._note("pause")

    async def resume(self) -> dict[str, Any]:
        return self._note("resume")

    def set_log_level(self, level: str) -> None:
        self._note(level)

    # the withdrawal's I/O

    async def begin(self, reason: Any) -> None:
        self.state.withdrawn = reason
        await self.announce(draining=True)
        self.done.append("begin")

    async def empty(self, grace_s: float) -> None:
        self.done.append(f"empty {grace_s:g}")

    async def leave_prefills(self, grace_s: float) -> None:
        self.done.append("leave prefills")

    async def announce(self, **changes: Any) -> None:
        self.state.update_member(**changes)
        self.done.append(" ".join(f"{name}={value}" for name, value in changes.items()))

    def end(self) -> None:
        self.state.withdrawn = ""
        self.done.append("end")

    @property
    def refusal(self) -> str:
        return Withdrawal.refusal.fget(cast("Any", type("W", (), {"_state": self.state})()))  # type: ignore[attr-defined,no-any-return]

    async def do(self, command: Any) -> Operated:
        deps = WorkerDeps(messaging=cast("Any", None), subjects=cast("Any", None))
        self.done = []
        return await WorkerOperations(deps, self.state, cast("Any", self), cast("Any", self)).do(command)


async def test_a_sleep_and_a_wake_go_through_their_steps_in_order() -> None:
    world = World()
    assert (await world.do(Sleep(grace_s=3.0))).ok
    assert world.done == ["draining=True", "begin", "empty 3", "sleep", "sleeping=1"]
    assert not world.state.taking
    assert (await world.do(Wake())).ok
    assert world.done == ["waking=True", "wake", "draining=False sleeping=0 waking=False", "end"]
    assert world.state.taking


async def test_a_pause_keeps_the_runs_unless_it_has_a_grace_period() -> None:
    world = World()
    assert (await world.do(Pause())).ok
    assert world.done == ["draining=True", "begin", "leave prefills", "pause", "paused=True"]
    assert (await world.do(Resume())).ok
    assert world.done == ["resume", "draining=False paused=False", "end"]
    await world.do(Pause(grace_s=2.0))
    assert "empty 2" in world.done


@pytest.mark.parametrize("command", [Sleep(), Pause()])
async def test_what_the_engine_cannot_do_is_refused_before_anything_changes(command: Any) -> None:
    world = World()
    world.fails["check"] = "sleep pause"
    answer = await world.do(command)
    assert (answer.ok, world.done, world.state.taking) == (False, [], True)
    assert "cannot" in answer.message


@pytest.mark.parametrize("command", [Sleep(), Pause()])
async def test_a_worker_whose_engine_fails_to_stand_still_serves_again(command: Any) -> None:
    world = World()
    world.fails = {"sleep": "no memory", "pause": "no memory"}
    answer = await world.do(command)
    assert (answer.ok, answer.message) == (False, "no memory")
    assert world.done[-2:] == ["draining=False", "end"]
    assert world.state.taking


async def test_a_worker_that_cannot_be_woken_stays_asleep_and_can_be_woken_later() -> None:
    world = World()
    await world.do(Sleep())
    world.fails = {"wake": "no memory"}
    assert not (await world.do(Wake())).ok
    member = world.state.member
    assert (member.sleeping, member.waking, member.draining, world.state.taking) == (1, False, True, False)
    world.fails = {}
    assert (await world.do(Wake())).ok
    assert world.state.taking


@pytest.mark.parametrize(
    ("first", "then", "ok"),
    [
        (Sleep(), Pause(), False),
        (Sleep(), Sleep(level=2), False),
        (Sleep(), Sleep(), True),
        (Sleep(), Resume(), True),  # nothing to do
        (Pause(), Sleep(), False),
        (Pause(), Pause(), True),
        (Pause(), Wake(), True),  # nothing to do
    ],
)
async def test_one_state_at_a_time(first: Any, then: Any, ok: bool) -> None:
    world = World()
    await world.do(first)
    before = world.state.member
    assert (await world.do(then)).ok is ok
    assert world.done == []
    assert world.state.member == before


@pytest.mark.parametrize("command", [Sleep(), Pause()])
async def test_a_worker_that_leaves_is_left_alone(command: Any) -> None:
    world = World()
    world.state.draining = True
    answer = await world.do(command)
    assert (answer.ok, answer.message, world.done) == (False, "worker w is draining", [])


async def test_a_sleeping_worker_that_leaves_is_not_woken() -> None:
    world = World()
    await world.do(Sleep())
    world.state.draining = True
    assert not (await world.do(Wake())).ok
    assert world.done == []


async def test_no_canary_is_sent_to_an_engine_that_stands_still() -> None:
    world = World()
    assert (await world.do(CheckHealth())).report == {"canary": True, "state": "serving"}
    await world.do(Pause())
    assert (await world.do(CheckHealth())).report == {"canary": False, "state": "pause"}


async def test_a_worker_without_operations_refuses_all() -> None:
    deps = WorkerDeps(messaging=cast("Any", None), subjects=cast("Any", None))
    answer = await WorkerOperations(deps, World().state, cast("Any", None), None).do(SetLogLevel(level="debug"))
    assert not answer.ok


class Broken:
    """Adapters of an engine that fails, and what is answered."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.messaging = self

    async def load(self, name: str, source: str) -> str:
        raise OSError(36, "File name too long")

    def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        self.sent.append((subject, data))


async def test_a_failing_adapter_ends_its_command_and_not_the_worker() -> None:
    world = Broken()
    commands = OperatorCommands.__new__(OperatorCommands)
    for name, value in {"_messaging": world, "_adapters": world, "_state": state()}.items():
        setattr(commands, name, cast("Any", value))
    async with asyncio.timeout(5), TaskScope() as tasks:
        commands._tasks = tasks
        commands.begin_adapter(LoadAdapter(name="a", source="x" * 5000), "back")
    ((subject, data),) = world.sent
    assert subject == "back"
    assert decode(Done, data) == Done(ok=False, message="adapter 'a' was not changed: OSError")
