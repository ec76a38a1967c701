"""Lets a planner on the same machine ask the running `headrace up` for one more worker, over a socket in the run folder.

One line of JSON each way: {"start": "aggregated", "model": "name"} → {"worker": "worker-3"} or {"error": "…"}. Only the user
who runs `up` can open the socket. Workers leave by a drain over NATS, like any other: the supervisor needs no command for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import structlog

from headrace.base.errors import CommandError, SettingsError

_log = structlog.get_logger()

Start = Callable[[str, str], str]
"""Starts a worker of a model in a role and returns its name. Raises CommandError."""

_ANSWER_S = 10.0
_LONGEST = 4096  # bytes of a line


def socket_of(data_dir: Path) -> Path:
    """Return where the socket of a data folder is while `headrace up` runs."""
    return data_dir / "run" / "up.sock"


@contextlib.asynccontextmanager
async def worker_control(path: Path, start: Start) -> AsyncIterator[None]:
    """Answer at the socket while open. Where it cannot be opened, `up` runs without, and says so."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                told = _answer(await reader.readline(), start)
                writer.write(json.dumps(told).encode() + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # the asker has left
        finally:
            writer.close()

    _remove(path)  # of an `up` that was killed
    try:
        server = await asyncio.start_unix_server(answer, path, limit=_LONGEST)
    except OSError as error:  # its path is too long, or the file system has none
        _log.warning("up.no_worker_control", path=str(path), error=str(error))
        yield
        return
    os.chmod(path, 0o600)
    try:
        yield
    finally:
        server.close()
        _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _answer(line: bytes, start: Start) -> dict[str, str]:
    try:
        asked = json.loads(line)
        return {"worker": start(str(asked["model"]), str(asked["start"]))}
    except (CommandError, SettingsError) as error:
        return {"error": str(error)}
    except (ValueError, KeyError, TypeError):
        return {"error": "that is no command of this version"}


async def ask_for_worker(path: str, *, model: str, role: str) -> str:
    """Ask for one more worker and return its name. Raises CommandError."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(json.dumps({"start": role, "model": model}).encode() + b"\n")
                await writer.drain()
                told = json.loads(await reader.readline())
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        raise CommandError(f"the `headrace up` at {path} does not answer: {error}") from error
    if "error" in told:
        raise CommandError(told["error"])
    return str(told["worker"])
