"""Each kind of control message has a handler, and a sender that waits gets an answer."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from structlog.testing import capture_logs

from headrace.broker.codec import decode, encode
from headrace.broker.messages.control import (
    Abort,
    Answers,
    Done,
    Drain,
    Inspect,
    Inspection,
    KvDump,
    LoadAdapter,
    Ping,
    RunRef,
    RunVerdict,
    UnloadAdapter,
)
from headrace.broker.messages.events import Cancel
from headrace.broker.messages.operator import (
    CheckHealth,
    Pause,
    Profile,
    ResetCache,
    Resume,
    SetLogLevel,
    Sleep,
    Wake,
    WorkerCommand,
)
from headrace.broker.messages.prefill import AnyWorkerControl, PrefillCheck, PrefillDrop, PrefillState, SetRole
from headrace.broker.messages.requests import EncodeMedia, MediaEncoded
from headrace.broker.protocol.run import Run
from headrace.broker.worker.inbox import JudgeInbox, PrefillInbox, WorkerInbox
from headrace.broker.worker.operations import Inspector
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects
from tests.unit.broker.protocol.test_protocol_runs import make
from tests.unit.broker.worker.test_state import state


class World:
    """The connection, the lease, the commands and what drops runs."""

    held = True

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.drains: list[float | None] = []
        self.dropped: list[tuple[str, int, str]] = []

    def send(self, subject: str, data: bytes) -> None:
        self.sent.append((subject, data))

    def begin_drain(self, grace_s: float | None) -> None:
        self.drains.append(grace_s)

    def begin_role(self, role: str, grace_s: float | None, reply_to: str) -> None: ...
    def begin_adapter(self, command: Any, reply_to: str) -> None: ...

    def drop(self, run: Run, *, how: str) -> None:
        self.dropped.append((run.id, run.attempt, how))


def inbox(world: Any, one: WorkerState) -> WorkerInbox:
    deps = WorkerDeps(messaging=world, subjects=Subjects())
    judges = JudgeInbox(one, world, world)
    return WorkerInbox(deps, one, judges, PrefillInbox(world, None), world, Inspector(one, world, None, None))


def test_every_kind_of_control_message_has_a_handler() -> None:
    assert set(inbox(World(), state())._handlers) == set(get_args(AnyWorkerControl))


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (Ping(), Done()),
        (KvDump(), Done(ok=False, message="worker w publishes no cache events")),
        (Inspect(), Inspection(component="w", runs=[], states={}, lease_held=True, draining=False)),
        (PrefillCheck(job="j"), PrefillState(state="unknown")),
        (EncodeMedia(id="r", name="0" * 64), MediaEncoded(ok=False, message="worker w encodes nothing for others now")),
    ],
)
def test_who_waits_is_answered(message: Any, answer: Any) -> None:
    world = World()
    inbox(world, state()).on_control(Message("c", encode(message), "back"))
    ((subject, data),) = world.sent
    assert (subject, decode(type(answer), data)) == ("back", answer)


@pytest.mark.parametrize("message", [Ping(), PrefillDrop(jobs=["j"]), Abort(runs=[RunRef("q", 1, 1)])])
def test_who_does_not_wait_is_not_answered(message: Any) -> None:
    world = World()
    inbox(world, state()).on_control(Message("c", encode(message), ""))
    inbox(world, state()).on_control(Message("c", b"\xc1", "back"))
    assert world.sent == []


def test_a_drain_is_begun_with_its_grace_period_and_answered() -> None:
    world = World()
    assert inbox(world, state()).on_operator(Message("adm", encode(Drain(grace_s=3.0)), "back"))
    assert world.drains == [3.0]
    assert [decode(Done, data) for _, data in world.sent] == [Done(message="0 runs to finish")]


@pytest.mark.parametrize(
    "command",
    [Drain(grace_s=3.0), SetRole(role="decode"), LoadAdapter(name="a", source="/a"), UnloadAdapter(name="a", grace_s=1.0)],
)
def test_a_command_that_comes_where_workers_and_judges_write_is_refused(command: Any) -> None:
    world = World()
    inbox(world, state()).on_control(Message("c", encode(command), "back"))
    assert world.drains == []
    ((_, data),) = world.sent
    assert not decode(Done, data).ok


OPERATING = (
    CheckHealth(),
    Sleep(),
    Wake(),
    Pause(),
    Resume(),
    ResetCache(),
    Profile(action="start"),
    SetLogLevel(level="debug"),
)


@pytest.mark.parametrize("command", OPERATING, ids=lambda command: type(command).__name__)
def test_no_command_of_operating_counts_where_workers_and_judges_write(command: Any) -> None:
    world, one = World(), state()
    with capture_logs() as logged:
        inbox(world, one).on_control(Message("c", encode(command), "back"))
        inbox(world, one).on_peer(Message("p", encode(command), "back"))
    assert [line["event"] for line in logged] == ["control.malformed"] * 2
    assert world.sent == []


def test_every_command_of_operating_is_tried_there() -> None:
    assert {type(command) for command in OPERATING} == set(get_args(WorkerCommand))


@pytest.mark.parametrize("data", [encode(Ping()), encode(Abort(runs=[RunRef("q", 1, 1)])), b"\xc1"])
def test_what_is_no_command_is_left_to_others_at_the_subject_of_commands(data: bytes) -> None:
    world = World()
    assert not inbox(world, state()).on_operator(Message("adm", data, "back"))
    assert world.sent == []


def two_runs() -> tuple[WorkerState, Run, Run]:
    one = state()
    old, new = make(1), make(2, attempt=2)
    one.runs.add(old)
    one.runs.add(new)
    return one, old, new


def test_an_abort_drops_the_run_it_names_and_no_other() -> None:
    world = World()
    one, old, _ = two_runs()
    inbox(world, one).on_control(Message("c", encode(Abort(runs=[old.ref]))))
    assert world.dropped == [("q", 1, "stale")]


def test_an_answer_settles_the_run_it_names_but_done_only_when_it_has_ended() -> None:
    world = World()
    one, old, new = two_runs()
    new.start()
    new.end(1.0)
    answers = [RunVerdict("q", 1, old.run, "done"), RunVerdict("q", 2, new.run, "done"), RunVerdict("q", 1, old.run, "stale")]
    inbox(world, one).on_control(Message("c", encode(Answers(answers=answers))))
    assert world.dropped == [("q", 2, "done"), ("q", 1, "stale")]


async def test_a_cancellation_drops_every_run_and_is_remembered() -> None:
    world: Any = World()
    one, _, _ = two_runs()
    judges = JudgeInbox(one, world, world)
    judges.on_cancel(Message("c", encode(Cancel(ids=["q", "other"]))))
    judges.on_cancel(Message("c", b"\xc1"))
    assert world.dropped == [("q", 1, "cancelled"), ("q", 2, "cancelled")]
    assert "other" in one.tombstones


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Drain(grace_s=3.0), {"command": "drain", "grace_s": 3.0}),
        (SetRole(role="decode"), {"command": "set_role", "role": "decode"}),
        (LoadAdapter(name="a", source="https://user:secret@host/a"), {"command": "load_adapter", "name": "a"}),
        (Inspect(), None),
        (Ping(), None),
    ],
)
def test_commands_that_change_the_worker_are_in_the_audit_log(message: Any, said: dict[str, Any] | None) -> None:
    with capture_logs() as logged:
        inbox(World(), state()).on_operator(Message("adm", encode(message), "back"))
    lines = [line for line in logged if line["event"] == "audit.worker_command"]
    if said is None:
        assert lines == []
    else:
        (line,) = lines
        assert said.items() <= line.items()
        assert {"worker", "pool", "model"} <= line.keys()
        assert "secret" not in str(line)


@pytest.mark.parametrize("message", [Abort(runs=[RunRef("q", 1, 1)]), Answers(answers=[]), Drain(grace_s=1.0), KvDump()])
def test_another_worker_cannot_speak_as_a_judge_or_a_router(message: Any) -> None:
    world = World()
    with capture_logs() as logs:
        inbox(world, state()).on_peer(Message("hr.peer.p.w", encode(message), "back"))
    assert world.sent == []
    assert world.drains == []
    assert [line["event"] for line in logs] == ["message.forged"]


def test_another_worker_is_answered_about_hand_overs() -> None:
    world = World()
    inbox(world, state()).on_peer(Message("hr.peer.p.w", encode(PrefillCheck(job="j")), "back"))
    ((subject, data),) = world.sent
    assert (subject, decode(PrefillState, data)) == ("back", PrefillState(state="unknown"))
