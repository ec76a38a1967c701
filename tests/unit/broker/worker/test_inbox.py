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
    Operated,
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
from headrace.broker.worker.inbox import Inbox
from headrace.jetstream.ports import Message
from tests.unit.broker.protocol.test_protocol_runs import make
from tests.unit.broker.worker.bench import Bench


class Worker(Bench):
    """A worker that writes down the commands that are begun."""

    def __init__(self, *runs: Run) -> None:
        super().__init__(*runs)
        self.drains: list[float | None] = []
        self.begun: list[Any] = []
        me: Any = self
        self.inbox = Inbox(self.deps, self.presence, self.runs, me, me)

    @property
    def answers(self) -> list[tuple[str, bytes]]:
        return self.world.sent  # type: ignore[no-any-return]

    def begin_drain(self, grace_s: float | None) -> None:
        self.drains.append(grace_s)

    def begin_role(self, role: str, grace_s: float | None, answer: Any) -> None: ...
    def begin_adapter(self, command: Any, answer: Any) -> None: ...

    def begin(self, command: Any, answer: Any) -> None:
        self.begun.append(command)


async def test_every_kind_of_control_message_has_a_handler() -> None:
    assert set(Worker().inbox._handlers) == set(get_args(AnyWorkerControl))


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
async def test_who_waits_is_answered(message: Any, answer: Any) -> None:
    worker = Worker()
    worker.inbox.on_control(Message("c", encode(message), "back"))
    ((subject, data),) = worker.answers
    assert (subject, decode(type(answer), data)) == ("back", answer)


@pytest.mark.parametrize("message", [Ping(), PrefillDrop(jobs=["j"]), Abort(runs=[RunRef("q", 1, 1)])])
async def test_who_does_not_wait_is_not_answered(message: Any) -> None:
    worker = Worker()
    worker.inbox.on_control(Message("c", encode(message), ""))
    worker.inbox.on_control(Message("c", b"\xc1", "back"))
    assert worker.answers == []


async def test_a_drain_is_begun_with_its_grace_period_and_answered() -> None:
    worker = Worker()
    worker.inbox.on_operator(Message("adm", encode(Drain(grace_s=3.0)), "back"))
    assert worker.drains == [3.0]
    assert [decode(Done, data) for _, data in worker.answers] == [Done(message="0 runs to finish")]


@pytest.mark.parametrize(
    "command",
    [Drain(grace_s=3.0), SetRole(role="decode"), LoadAdapter(name="a", source="/a"), UnloadAdapter(name="a", grace_s=1.0)],
)
async def test_a_command_that_comes_where_workers_and_judges_write_is_refused(command: Any) -> None:
    worker = Worker()
    worker.inbox.on_control(Message("c", encode(command), "back"))
    assert worker.drains == []
    ((_, data),) = worker.answers
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
async def test_no_command_of_operating_counts_where_workers_and_judges_write(command: Any) -> None:
    worker = Worker()
    with capture_logs() as logged:
        worker.inbox.on_control(Message("c", encode(command), "back"))
        worker.inbox.on_peer(Message("p", encode(command), "back"))
    assert [line["event"] for line in logged] == ["control.malformed"] * 2
    assert worker.answers == []


async def test_every_command_of_operating_is_tried_there() -> None:
    assert {type(command) for command in OPERATING} == set(get_args(WorkerCommand))


@pytest.mark.parametrize("command", OPERATING, ids=lambda command: type(command).__name__)
async def test_a_command_of_operating_is_begun_at_the_subject_of_commands(command: Any) -> None:
    worker = Worker()
    worker.inbox.on_operator(Message("adm", encode(command), "back"))
    assert (worker.begun, worker.answers) == ([command], [])


@pytest.mark.parametrize("data", [encode(Ping()), encode(Abort(runs=[RunRef("q", 1, 1)])), b"\xc1"])
async def test_a_message_that_is_not_a_command_is_refused_at_the_subject_of_commands(data: bytes) -> None:
    worker = Worker()
    worker.inbox.on_operator(Message("adm", data, "back"))
    assert worker.begun == []
    ((_, answer),) = worker.answers
    assert not decode(Operated, answer).ok


def two_runs() -> tuple[Worker, Run, Run]:
    old, new = make(1), make(2, attempt=2)
    return Worker(old, new), old, new


async def test_an_abort_drops_the_run_it_names_and_no_other() -> None:
    worker, old, new = two_runs()
    worker.inbox.on_control(Message("c", encode(Abort(runs=[old.ref]))))
    assert (old.gone, new.gone) == (True, False)


async def test_an_answer_settles_the_run_it_names_but_done_only_when_it_has_ended() -> None:
    worker, old, new = two_runs()
    new.start()
    new.end(1.0)
    for answer, gone in (
        (RunVerdict("q", 1, old.run, "done"), (False, False)),
        (RunVerdict("q", 2, new.run, "done"), (False, True)),
        (RunVerdict("q", 1, old.run, "stale"), (True, True)),
    ):
        worker.inbox.on_control(Message("c", encode(Answers(answers=[answer]))))
        assert (old.gone, new.gone) == gone


async def test_a_cancellation_drops_every_run_and_is_remembered() -> None:
    worker, old, new = two_runs()
    worker.inbox.on_cancel(Message("c", encode(Cancel(ids=["q", "other"]))))
    worker.inbox.on_cancel(Message("c", b"\xc1"))
    assert (old.gone, new.gone) == (True, True)
    assert "other" in worker.runs.tombstones


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
async def test_commands_that_change_the_worker_are_in_the_audit_log(message: Any, said: dict[str, Any] | None) -> None:
    with capture_logs() as logged:
        Worker().inbox.on_operator(Message("adm", encode(message), "back"))
    lines = [line for line in logged if line["event"] == "audit.worker_command"]
    if said is None:
        assert lines == []
    else:
        (line,) = lines
        assert said.items() <= line.items()
        assert {"worker", "pool", "model"} <= line.keys()
        assert "secret" not in str(line)


@pytest.mark.parametrize("message", [Abort(runs=[RunRef("q", 1, 1)]), Answers(answers=[]), Drain(grace_s=1.0), KvDump()])
async def test_another_worker_cannot_speak_as_a_judge_or_a_router(message: Any) -> None:
    worker = Worker()
    with capture_logs() as logs:
        worker.inbox.on_peer(Message("hr.peer.p.w", encode(message), "back"))
    assert worker.answers == []
    assert worker.drains == []
    assert [line["event"] for line in logs] == ["message.forged"]


async def test_another_worker_is_answered_about_hand_overs() -> None:
    worker = Worker()
    worker.inbox.on_peer(Message("hr.peer.p.w", encode(PrefillCheck(job="j")), "back"))
    ((subject, data),) = worker.answers
    assert (subject, decode(PrefillState, data)) == ("back", PrefillState(state="unknown"))
