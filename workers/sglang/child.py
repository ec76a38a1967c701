"""Runs SGLang in a child process: `python -m headrace.workers.sglang.child FD`, FD being its end of a socket pair.

SGLang kills its whole process tree when one of its processes fails, so it must not run in the worker itself. SGLang's own
processes import this module again as their main module: what it does at import, it does in all of them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import connection
from typing import Any

from headrace.workers.engine import Capabilities
from headrace.workers.engine_settings import json_as_text
from headrace.workers.errors import EngineStartFailed
from headrace.workers.kit import not_installed, starting
from headrace.workers.process_guard import set_parent_death_signal
from headrace.workers.sglang.cpu_plugin import stand_in
from headrace.workers.sglang.disagg_rendezvous import rendezvous_args, use_local_store
from headrace.workers.sglang.messages import ChildStartFailed, Frames, Start, Started, ToChild
from headrace.workers.sglang.settings import (
    SETTINGS,
    computes_on_cpu,
    follows,
    prepare_environment,
    server_args,
    sglang_settings,
)

_INSTALL = "`make install ENGINE=sglang`"

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    stand_in()


def build(start: Start) -> Any:
    """Import SGLang, load the model and wait until it is ready. Raises EngineStartFailed."""
    config = start.config
    try:
        import torch
    except ImportError as error:
        raise not_installed("PyTorch", error, _INSTALL) from error
    cpu = computes_on_cpu(config.args, gpu=torch.cuda.is_available())
    prepare_environment(config, os.environ, cpu=cpu)
    use_local_store(config.args, os.environ)
    if cpu:
        stand_in()
    try:
        import msgspec
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        raise not_installed("SGLang", error, _INSTALL) from error
    SETTINGS.check_names(config.args, [field.name for field in msgspec.structs.fields(ServerArgs)])
    config = replace(config, args=json_as_text(config.args, sglang_settings()))
    with starting("SGLang", config.model), rendezvous_args(config) as rendezvous:
        return Engine(**server_args(config, cpu=cpu, kv_events=start.kv_events, rendezvous=rendezvous))


async def serve(frames: Frames[ToChild], loop_start: Start) -> None:
    """Start the engine and serve the worker until it says `Stop` or is gone."""
    from headrace.workers.sglang.describe import capabilities, describe, describe_follower
    from headrace.workers.sglang.host import EngineHost

    try:
        # On this thread: SGLang sets signal handlers, and its objects belong to the event loop of the thread that made them.
        engine = build(loop_start)
        describing = describe_follower if follows(loop_start.config) else describe
        info = describing(engine, loop_start.config, version("sglang"))
    except EngineStartFailed as error:
        frames.send(ChildStartFailed(str(error)))
        await frames.flush()
        return
    if info.follows:
        frames.send(Started(info, Capabilities(resume=False, seeds=False)))
        await follow(frames)
        engine.shutdown()
        return
    frames.send(Started(info, capabilities(engine)))
    await EngineHost(engine, info, frames).serve()


async def follow(frames: Frames[ToChild]) -> None:
    """Wait until the worker says `Stop` or is gone, or one of SGLang's processes has ended: its first node ends all of them."""
    processes = multiprocessing.active_children()
    ended: asyncio.Task[Any] = asyncio.create_task(
        asyncio.to_thread(connection.wait, [process.sentinel for process in processes])
    )
    told = asyncio.create_task(frames.receive())
    await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)


async def run(worker: socket.socket) -> None:
    """Read the order to start, then start and serve."""
    reader, writer = await asyncio.open_connection(sock=worker)
    frames: Frames[ToChild] = Frames(reader, writer, ToChild)
    first = await frames.receive()
    if isinstance(first, Start):
        await serve(frames, first)


def main() -> None:
    """Run the child. What SGLang has started ends with it, or is killed by the worker."""
    set_parent_death_signal(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the worker decides when to stop
    worker = socket.socket(fileno=int(sys.argv[1]))
    worker.set_inheritable(False)
    asyncio.run(run(worker))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own end would wait for SGLang's threads


if __name__ == "__main__":
    main()
