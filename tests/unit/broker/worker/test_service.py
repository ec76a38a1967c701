"""Ways out of service and back: refused before anything changes, done in one order, and undone where the engine fails."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from headrace.base.errors import HeadraceError
from headrace.broker.messages.control import Done, LoadAdapter
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.operator import CheckHealth, Operated, Pause, Resume, SetLogLevel, Sleep, Wake
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.ports import EnginePorts
from headrace.broker.worker.service import Service
from tests.unit.broker.protocol.test_protocol_runs import make
from tests.unit.broker.worker.bench import Bench


class Worker(Bench):
    """A worker that writes down what is announced and done with its engine. `fails`: what the engine cannot do."""

    def __init__(self, *runs: Run, operable: bool = True, adapters: Any = None) -> None:
        super().__init__(*runs)
        self.done: list[str] = []
        self.fails: dict[str, str] = {}
        self.left_s: list[float] = []
        self.world.update = self._announced
        me: Any = self
        ports = EnginePorts(executor=self.world, operations=me if operable else None, adapters=adapters)
        self.service = Service(self.deps, self.presence, self.runs, me, ports, me, self.tasks)

    async def _announced(self, value: bytes) -> None:
        member = msgspec.msgpack.decode(value, type=WorkerMember)
        said = {name: getattr(member, name) for name in ("draining", "sleeping", "waking", "paused")}
        self.done.append(" ".join(name for name, value in said.items() if value) or "in service")

    def _note(self, what: str) -> dict[str, Any]:
        self.done.append(what)
        if what in self.fails:
            raise HeadraceError(self.fails[what])
        return {}

    # The intake and the prefill server.

    async def stop(self) -> None: ...

    async def leave(self, grace_s: float) -> None:
        self.left_s.append(round(grace_s, 1))

    def fail_all(self, why: str) -> None: ...

    # The engine.

    def check(self, operation: str, *, level: int = 0) -> None:
        if operation in self.fails.get("check", ""):
            raise HeadraceError(f"cannot {operation}")

    async def health(self, *, canary: bool, timeout_s: float) -> tuple[bool, dict[str, Any]]:
        return True, {"canary": canary}

    async def sleep(self, level: int) -> dict[str, Any]:
        return self._note("sleep")

    async def wake(self, level: int, *, role: str) -> dict[str, Any]:
        return self._note("wake")

    async def pause(self) -> dict[str, Any]:
        return self._note("pause")

    async def resume(self) -> dict[str, Any]:
        return self._note("resume")

    def set_log_level(self, level: str) -> None:
        self._note(level)

    async def do(self, command: Any) -> Operated:
        self.done = []
        return await self.service.operate(command)


def runs(**states: RunState) -> list[Run]:
    made = []
    for seq, (name, state) in enumerate(states.items()):
        run = make(seq, request_id=name)
        run.begin([], [])
        run.state = state
        made.append(run)
    return made


ENGINE, NOT = ("w#engine", 3), (None, 0)


@pytest.mark.parametrize(
    ("named", "moved"),
    [
        ((), [ENGINE, ENGINE, ENGINE, NOT]),
        (("b",), [NOT, ("w#named", 1), NOT, NOT]),
        (("b", "c", "waits"), [NOT, ("w#named", 2), ("w#named", 2), NOT]),
        (("elsewhere",), [ENGINE, ENGINE, ENGINE, NOT]),
    ],
)
async def test_the_death_of_an_engine_is_written_down_for_what_was_in_it_or_for_what_it_names(
    named: tuple[str, ...], moved: list[tuple[str | None, int]]
) -> None:
    running = RunState.RUNNING
    worker = Worker(*runs(a=running, b=running, c=running, waits=RunState.WAITING))
    await worker.service.engine_died("out of memory", named)
    assert worker.world.moved == [(seq, suspect, "engine_died", group) for seq, (suspect, group) in enumerate(moved)]
    assert worker.service.done.is_set()


async def test_a_drain_moves_at_once_what_waits_and_the_rest_after_its_grace_period() -> None:
    worker = Worker(*runs(runs=RunState.RUNNING, waits=RunState.WAITING))
    draining = asyncio.create_task(worker.service.drain(0.1))
    await asyncio.sleep(0.01)
    assert worker.done == ["draining"], "it is announced before anything is moved"
    assert worker.world.moved == [(1, None, "drain", 0)]
    assert worker.world.kept == [{0}], "what runs is not taken from the queue"
    await draining
    assert worker.world.moved[1:] == [(0, None, "drain", 0)]
    assert worker.left_s == [0.0]


async def test_a_drain_ends_when_nothing_runs_and_leaves_the_rest_of_its_time_to_prefills() -> None:
    worker = Worker()
    async with asyncio.timeout(5):
        await worker.service.drain(60.0)
    assert worker.left_s == [60.0]


async def test_a_sleep_and_a_wake_go_through_their_steps_in_order() -> None:
    worker = Worker()
    assert (await worker.do(Sleep(grace_s=3.0))).ok
    assert worker.done == ["draining", "sleep", "draining sleeping"]
    assert not worker.presence.taking
    assert (await worker.do(Wake())).ok
    assert worker.done == ["draining sleeping waking", "wake", "in service"]
    assert worker.presence.taking


async def test_a_pause_keeps_the_runs_unless_it_has_a_grace_period() -> None:
    worker = Worker(*runs(runs=RunState.RUNNING))
    assert (await worker.do(Pause())).ok
    assert worker.done == ["draining", "pause", "draining paused"]
    assert worker.left_s == [0.0], "decode workers do not wait for the end of the pause"
    assert worker.world.moved == []
    assert (await worker.do(Resume())).ok
    assert worker.done == ["resume", "in service"]
    await worker.do(Pause(grace_s=0.0))
    assert worker.world.moved == [(0, None, "pause", 0)]


@pytest.mark.parametrize("command", [Sleep(), Pause()])
async def test_what_the_engine_cannot_do_is_refused_before_anything_changes(command: Any) -> None:
    worker = Worker()
    worker.fails["check"] = "sleep pause"
    answer = await worker.do(command)
    assert (answer.ok, worker.done, worker.presence.taking) == (False, [], True)
    assert "cannot" in answer.message


@pytest.mark.parametrize("command", [Sleep(), Pause()])
async def test_a_worker_whose_engine_fails_to_stand_still_serves_again(command: Any) -> None:
    worker = Worker()
    worker.fails = {"sleep": "no memory", "pause": "no memory"}
    answer = await worker.do(command)
    assert (answer.ok, answer.message) == (False, "no memory")
    assert worker.done[-1] == "in service"
    assert worker.presence.taking


async def test_a_worker_that_cannot_be_woken_stays_asleep_and_can_be_woken_later() -> None:
    worker = Worker()
    await worker.do(Sleep())
    worker.fails = {"wake": "no memory"}
    assert not (await worker.do(Wake())).ok
    member = worker.presence.member
    assert (member.sleeping, member.waking, member.draining, worker.presence.taking) == (1, False, True, False)
    worker.fails = {}
    assert (await worker.do(Wake())).ok
    assert worker.presence.taking


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
    worker = Worker()
    await worker.do(first)
    before = worker.presence.member
    assert (await worker.do(then)).ok is ok
    assert worker.done == []
    assert worker.presence.member == before


@pytest.mark.parametrize("command", [Sleep(), Pause()])
async def test_a_worker_that_leaves_is_left_alone(command: Any) -> None:
    worker = Worker()
    worker.presence.leave()
    answer = await worker.do(command)
    assert (answer.ok, answer.message, worker.done) == (False, "worker w is draining", [])


async def test_a_sleeping_worker_that_leaves_is_not_woken() -> None:
    worker = Worker()
    await worker.do(Sleep())
    worker.presence.leave()
    assert not (await worker.do(Wake())).ok
    assert worker.done == []


async def test_no_canary_is_sent_to_an_engine_that_stands_still() -> None:
    worker = Worker()
    assert (await worker.do(CheckHealth())).report == {"canary": True, "state": "serving"}
    await worker.do(Pause())
    assert (await worker.do(CheckHealth())).report == {"canary": False, "state": "pause"}


async def test_a_worker_without_operations_refuses_all() -> None:
    assert not (await Worker(operable=False).do(SetLogLevel(level="debug"))).ok


class Broken:
    """The adapters of an engine that fails."""

    async def load(self, name: str, source: str) -> None:
        raise OSError(36, "File name too long")

    async def unload(self, name: str) -> None: ...


async def test_a_failing_adapter_ends_its_command_and_not_the_worker() -> None:
    worker, answers = Worker(adapters=Broken()), []
    async with asyncio.timeout(5), worker.tasks:
        worker.service.begin_adapter(LoadAdapter(name="a", source="x" * 5000), answers.append)
    assert answers == [Done(ok=False, message="adapter 'a' was not changed: OSError")]
