from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.messages.frames import TokenLogprob
from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Capabilities, EngineConfig, EngineInfo, Handover, Load, Output, PoolItem, Role, Sequence
from headrace.workers.errors import EngineDead, EngineError, EngineOverloaded, RequestInvalid, UnsupportedByEngine
from headrace.workers.sglang import messages
from headrace.workers.sglang.messages import (
    Abort,
    ChildProcess,
    ChildStartFailed,
    Control,
    Error,
    FrameBroken,
    Frames,
    PoolInput,
    Reply,
    Start,
    Started,
    StepOutputs,
    Stop,
    Submit,
    ToChild,
    ToWorker,
    translated,
)

INFO = EngineInfo(
    engine="sglang",
    version="0",
    tokenizer_dir="/m",
    context_length=9,
    block_size=32,
    blocks=4,
    slots=2,
    vocab_size=7,
    eos_token_ids=(2,),
)
SEQUENCE = Sequence(
    id="a-1-0",
    token_ids=[1, 2],
    prompt_tokens=2,
    media=[],
    sampling=Sampling(max_tokens=3, logit_bias={1: 0.5}),
    handover=Handover(kind="decode", room=4, peer="host:1"),
    guided={"json": {"type": "object"}},
)


async def connected() -> tuple[Frames[ToWorker], Frames[ToChild]]:
    one, other = socket.socketpair()
    worker = Frames[ToWorker](*await asyncio.open_connection(sock=one), ToWorker)
    return worker, Frames[ToChild](*await asyncio.open_connection(sock=other), ToChild)


async def test_every_message_arrives_as_it_was_sent() -> None:
    worker, child = await connected()
    config = EngineConfig(model="m", served_name="s", role=Role.DECODE, args={"dtype": "float32"})
    item = PoolItem(id="p", task="embed", token_ids=[1])
    for order in (
        Start(config, {"topic": "t"}),
        Submit(1, SEQUENCE),
        Abort(["a"]),
        PoolInput(2, item),
        Control(3, "load_adapter", {"name": "n"}),
        Stop(),
    ):
        worker.send(order)
        assert await child.receive() == order
    outputs = [Output("a-1-0", [3], logprobs=[TokenLogprob(3, b"\xff", -0.5, [(3, b"\xff", -0.5)])])]
    for report in (
        Started(INFO, Capabilities(guided=frozenset({"json"}))),
        ChildStartFailed("no model"),
        StepOutputs(outputs, Load(running=1)),
        Reply(1),
        Reply(2, [b"\0", 3]),
        Reply(3, error=Error("invalid", "no", "top_p")),
    ):
        child.send(report)
        assert await worker.receive() == report
    worker.close()
    assert await child.receive() is None
    child.close()


async def test_a_broken_frame_is_an_error_and_not_a_message() -> None:
    one, other = socket.socketpair()
    frames = Frames[ToChild](*await asyncio.open_connection(sock=one), ToChild)
    other.sendall((2).to_bytes(4, "big") + b"\xc1\xc1")
    with pytest.raises(FrameBroken):
        await frames.receive()
    other.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(FrameBroken, match="4294967295"):
        await frames.receive()
    frames.close()
    other.close()


async def test_a_stream_that_ends_within_a_frame_has_ended() -> None:
    one, other = socket.socketpair()
    frames = Frames[ToChild](*await asyncio.open_connection(sock=one), ToChild)
    other.sendall(b"\0\0\0\x09abc")
    other.close()
    assert await frames.receive() is None
    frames.close()


ROOT = Path(__file__).parents[4]


class Owner:
    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.ended: list[str] = []
        self.end = asyncio.Event()

    def on_end(self, reason: str) -> None:
        self.ended.append(reason)
        self.end.set()


async def within(work: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(10):
        return await work


def submit(name: str, call: int) -> Submit:
    return Submit(call, Sequence(id=name, token_ids=[1], prompt_tokens=1, sampling=Sampling(max_tokens=2)))


@pytest_asyncio.fixture
async def started(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ChildProcess, Owner]]:
    monkeypatch.setattr(messages, "_COMMAND", ("-P", str(ROOT / "tests" / "support" / "sglang_child_stand_in.py")))
    owner = Owner()
    child = ChildProcess(owner.outputs.extend, owner.on_end)
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
