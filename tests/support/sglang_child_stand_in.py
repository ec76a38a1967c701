"""A stand-in for SGLang's child process: it speaks to the worker as the real one does, and has no SGLang in it.

Run as `python sglang_child_stand_in.py FD`. What it was started with goes to the file `STAND_IN_RECORD` as JSON: the fields of
SGLang's `ServerArgs`, and the environment. `STAND_IN_START` is `refuse` or `die` for a start that fails.

A sequence gets its prompt back, a token per message. By its id: `invalid…` and `unsupported…` are refused, `overloaded…` too,
`silent…` gets nothing, `die…` ends the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from typing import Any

from headrace.workers.engine import Capabilities, EngineInfo, Load, Output
from headrace.workers.sglang.messages import (
    Abort,
    ChildStartFailed,
    Control,
    Error,
    Frames,
    PoolInput,
    Reply,
    Start,
    Started,
    StepOutputs,
    Stop,
    Submit,
    ToChild,
)
from headrace.workers.sglang.settings import follows, ranks, server_args

REFUSALS = ("invalid", "unsupported", "overloaded", "failed")


def record(start: Start) -> None:
    path = os.environ.get("STAND_IN_RECORD")
    if path:
        fields = server_args(start.config, cpu=True, kv_events=start.kv_events)
        with open(path, "w") as file:
            json.dump({"fields": fields, "environ": dict(os.environ), "argv": sys.argv}, file)


def info(start: Start) -> EngineInfo:
    pooling = bool(start.config.args.get("is_embedding"))
    return EngineInfo(
        engine="sglang",
        version="0",
        tokenizer_dir="/m",
        context_length=100,
        block_size=32,
        blocks=10 * ranks(start.config),
        slots=4,
        vocab_size=100,
        eos_token_ids=(2,),
        kinds=("embedding",) if pooling else ("chat",),
        ranks=ranks(start.config),
        follows=follows(start.config),
    )


def answer(message: Any, frames: Any) -> None:
    match message:
        case Submit():
            name = message.sequence.id
            refusal = next((kind for kind in REFUSALS if name.startswith(kind)), None)
            if name.startswith("die"):
                os._exit(3)
            if refusal is not None:
                frames.send(Reply(message.call, error=Error(refusal, f"{name} is refused", "param")))  # type: ignore[arg-type]
                return
            frames.send(Reply(message.call))
            if name.startswith("silent"):
                return
            ids = message.sequence.token_ids
            for place, token in enumerate(ids, 1):
                finish = "length" if place == len(ids) else None
                output = Output(name, [token], finish=finish, cached_tokens=0 if place == 1 else None)  # type: ignore[arg-type]
                frames.send(StepOutputs([output], Load(running=1, blocks_total=10)))
        case Abort():
            frames.send(StepOutputs([Output(name, [99]) for name in message.ids], Load()))  # what was under way
        case PoolInput():
            frames.send(Reply(message.call, [b"\0\0\x80?", 3]))
        case Control():
            frames.send(Reply(message.call, {"did": message.operation}))


async def main() -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=int(sys.argv[1])))
    frames: Frames[Any] = Frames(reader, writer, ToChild)
    start = await frames.receive()
    record(start)
    match os.environ.get("STAND_IN_START"):
        case "refuse":
            frames.send(ChildStartFailed("SGLang has no setting 'x'"))
            await frames.flush()
            return
        case "die":
            os._exit(3)
    frames.send(Started(info(start), Capabilities(lora="dynamic")))
    while (message := await frames.receive()) is not None and not isinstance(message, Stop):
        answer(message, frames)
        await frames.flush()


if __name__ == "__main__":
    asyncio.run(main())
