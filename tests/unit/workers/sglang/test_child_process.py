"""Calls to the child process, and what becomes of them when it ends or breaks off; the child is a stand-in."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, Output, Sequence
from headrace.workers.errors import EngineDead, EngineError, EngineOverloaded, RequestInvalid, UnsupportedByEngine
from headrace.workers.sglang import child_process
from headrace.workers.sglang.child_process import ChildProcess, translated
from headrace.workers.sglang.messages import Control, Error, Start, Submit

ROOT = Path(__file__).parents[4]


class Owner:
    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.ended: list[str] = []
        self.end = asyncio.Event()

    def take_outputs(self, outputs: list[Output]) -> None:
        self.outputs += outputs

    def child_ended(self, reason: str) -> None:
        self.ended.append(reason)
        self.end.set()


async def within(work: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(10):
        return await work


def submit(name: str, call: int) -> Submit:
    return Submit(call, Sequence(id=name, token_ids=[1], prompt_tokens=1, sampling=Sampling(max_tokens=2)))


@pytest_asyncio.fixture
async def started(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ChildProcess, Owner]]:
    monkeypatch.setattr(child_process, "_COMMAND", ("-P", str(ROOT / "tests" / "support" / "sglang_child_stand_in.py")))
    owner = Owner()
    child = ChildProcess(owner)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    environ.pop("STAND_IN_RECORD", None)
    await child.start(Start(EngineConfig(model="m", served_name="s")), environ)
    try:
        yield child, owner
    finally:
        await child.stop(2.0)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("invalid", RequestInvalid),
        ("unsupported", UnsupportedByEngine),
        ("overloaded", EngineOverloaded),
        ("failed", EngineError),
    ],
)
def test_each_kind_of_error_has_its_exception(kind: str, error: type[Exception]) -> None:
    made = translated(Error(kind, "why", "p"))  # type: ignore[arg-type]
    assert type(made) is error
    assert str(made) == "why"


async def test_each_call_gets_its_own_reply(started: tuple[ChildProcess, Owner]) -> None:
    child, _ = started
    names = ["a", "b", "c"]
    replies = await asyncio.gather(*(child.call(lambda call, name=name: Control(call, name, {})) for name in names))
    assert [reply["did"] for reply in replies] == names


async def test_calls_under_way_fail_with_the_child_and_its_owner_is_told_once(started: tuple[ChildProcess, Owner]) -> None:
    child, owner = started
    with pytest.raises(EngineDead, match="process is gone"):  # not a TimeoutError
        await within(child.call(lambda call: submit("die", call)))
    await asyncio.wait_for(owner.end.wait(), 10)
    assert len(owner.ended) == 1
    with pytest.raises(EngineDead):
        child.send(submit("a", 1))


async def test_a_stop_is_no_death(started: tuple[ChildProcess, Owner]) -> None:
    child, owner = started
    await child.stop(5.0)
    assert owner.ended == []
    with pytest.raises(EngineDead):
        child.send(submit("a", 1))


async def test_a_child_that_does_not_end_in_time_is_killed(started: tuple[ChildProcess, Owner]) -> None:
    child, owner = started
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    await within(child.stop(0.1))
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    assert owner.ended == []
