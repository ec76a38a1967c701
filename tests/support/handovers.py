"""Looks at hand-overs of a running deployment: which worker computes which prompt, and the blocks that are held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.prefill import PrefillTaken
from headrace.commands.control import live_workers
from headrace.jetstream.client import Connection
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects
from tests.support.up_process import RunningUp

SUBJECTS = Subjects()

Asked = TypeVar("Asked")


def workers(up: RunningUp) -> dict[str, WorkerMember]:
    """Ready workers by name."""

    async def ask() -> dict[str, WorkerMember]:
        options = up.connect_options()
        async with await Connection.connect(options, subjects=SUBJECTS) as connection:
            return {m.worker.rpartition("-")[0]: m for m in await live_workers(connection, SUBJECTS) if not m.draining}

    return asyncio.run(ask())


class Taken(NamedTuple, Generic[Asked]):
    """A request whose prompt a prefill worker has begun to compute."""

    asking: Asked
    prefill: WorkerMember
    decode: WorkerMember


def once_taken(up: RunningUp, ask: Callable[[], Asked]) -> Taken[Asked]:
    """Ask, and wait until the prompt is being computed: a busy machine may take its time until then."""

    async def until_taken() -> Taken[Asked]:
        options = up.connect_options()
        async with await Connection.connect(options, subjects=SUBJECTS) as connection, asyncio.timeout(30):
            members = {member.worker: member for member in await live_workers(connection, SUBJECTS)}
            taken: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

            def on_control(message: Message) -> None:
                with suppress(WireError):
                    told = decode(PrefillTaken, message.data)
                    if not taken.done():
                        taken.set_result((told.worker, message.subject.rpartition(".")[2]))

            await connection.subscribe(f"{SUBJECTS.prefix}.ctl.*", on_control)
            await connection.subscribe(f"{SUBJECTS.prefix}.peer.*.*", on_control)  # where workers log in
            await connection.barrier()
            asking = ask()
            prefill, decoding = await taken
            return Taken(asking, members[prefill], members[decoding])

    return asyncio.run(until_taken())


def blocks_used(up: RunningUp) -> dict[str, int]:
    """KV blocks that sequences or hand-overs hold, by worker, as its next load report says."""

    async def ask() -> dict[str, int]:
        found: dict[str, int] = {}
        options = up.connect_options()
        async with await Connection.connect(options, subjects=SUBJECTS) as connection:
            live = await live_workers(connection, SUBJECTS)

            def on_report(message: Message) -> None:
                report = decode(LoadReport, message.data)
                found[report.worker] = report.blocks_used + report.running

            await connection.subscribe(SUBJECTS.load_filter(live[0].pool), on_report)
            await asyncio.sleep(0.5)
        return {member.worker: found[member.worker] for member in live}

    return asyncio.run(ask())


def no_block_is_kept(up: RunningUp, names: int, timeout_s: float = 30.0) -> None:
    """Wait until `names` workers are there and none of them holds a block."""
    up.until("no block is kept", lambda: len(used := blocks_used(up)) >= names and not any(used.values()), timeout_s)


def failures(up: RunningUp) -> list[str]:
    """The reasons of all hand-overs that failed."""
    return [event["reason"] for event in up.events("prefill.failed")]


def handed_over(up: RunningUp) -> list[str]:
    """The names of the workers that have computed prompts for another one, as logged so far."""
    return [event["by"].rpartition("-")[0] for event in up.events("prefill.handed_over")]


def must_be_handed_over(up: RunningUp, names: list[str], *, after: int = 0, timeout_s: float = 30.0) -> None:
    """Wait for the log to name these workers, after the first `after` hand-overs.

    A short answer may end before its hand-over is logged: in a rendezvous the token may be faster than the prefill worker's
    report.
    """
    up.until(f"{len(names)} more hand-overs are logged", lambda: len(handed_over(up)) >= after + len(names), timeout_s)
    assert handed_over(up)[after:] == names
