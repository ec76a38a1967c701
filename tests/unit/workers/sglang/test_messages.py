from __future__ import annotations

import asyncio
import socket

import pytest

from headrace.broker.messages.frames import TokenLogprob
from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Capabilities, EngineConfig, EngineInfo, Handover, Load, Output, PoolItem, Role, Sequence
from headrace.workers.sglang.messages import (
    Abort,
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
