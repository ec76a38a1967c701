"""A suspect that is to run alone starts beside others once it has waited long enough, and longer the more often it crashed."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from headrace.broker.messages.members import WorkerMember
from headrace.broker.protocol.run import RunState
from headrace.broker.protocol.runs import Turn
from headrace.broker.settings import SessionSettings, Timing
from headrace.broker.worker.run_admission import RunAdmission
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from tests.unit.broker.protocol.test_protocol_runs import make

NOTHING: Any = None


@pytest.mark.parametrize(("crashes", "starts"), [(2, True), (3, True), (4, False), (9, False)])
async def test_the_patience_of_a_suspect_doubles_with_each_crash_after_the_third(crashes: int, *, starts: bool) -> None:
    deps = WorkerDeps(
        messaging=cast("Messaging", None),
        subjects=Subjects("hr"),
        settings=SessionSettings(timing=Timing(trial_alone_s=10.0)),
    )
    state = WorkerState(WorkerMember(worker="w1", pool="p", model="m", slots=8), slots=8, tombstone_s=1.0)
    beside, suspect = make(1, request_id="o"), make(2, request_id="s", attempt=3)
    beside.state = RunState.RUNNING
    for run in (beside, suspect):
        state.runs.add(run)
    state.runs.suspect(suspect, 1, crashes)
    admission = RunAdmission(deps, state, NOTHING, NOTHING, NOTHING, TaskScope())
    waiting = asyncio.create_task(admission._turn_of(suspect, asyncio.get_running_loop().time() - 15.0))
    await asyncio.sleep(0)
    assert waiting.done() is starts
    if starts:
        assert waiting.result() == Turn(1, beside=True)
    waiting.cancel()
