"""Runs `headrace jobs ls`, `show`, `cancel` and `watch`: the jobs of a tenant, their results, and what happens to them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError
from headrace.broker.durable.names import job_token
from headrace.broker.messages import JobProgress
from headrace.client.client import Client, ClientOptions, client_of
from headrace.client.errors import NotAllowed, UnknownJob
from headrace.client.listing import ListedJob
from headrace.commands.operating.audit import announce
from headrace.commands.operating.control_client import columns, connected
from headrace.config.settings import Settings
from headrace.jetstream.client import Connection
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects

T = TypeVar("T")
_EVENTS = 1024  # that may wait to be printed


def _client(connection: Connection, names: Subjects, tenant: str) -> Client:
    return client_of(connection, names, ClientOptions(tenant=tenant, prefix=names.prefix))


def _connected(settings: Settings, ask: Callable[[Connection, Subjects], Awaitable[T]]) -> T:
    """Run `ask` with a connection. Raises CommandError also for what the login of a tenant cannot do."""
    try:
        return connected(settings, ask, name="headrace jobs")
    except NotAllowed as error:
        raise CommandError(str(error)) from None


def list_jobs(settings: Settings, *, tenant: str, limit: int, as_json: bool) -> int:
    """Run `headrace jobs ls`."""

    async def ask(connection: Connection, names: Subjects) -> list[ListedJob]:
        return await _client(connection, names, tenant).jobs(limit=limit)

    found = _connected(settings, ask)
    if as_json:
        sys.stdout.write(json.dumps([msgspec.to_builtins(job) for job in found], indent=1) + "\n")
        return EXIT_OK
    head = ["job", "status", "class", "endpoint", "batch", "stored", "ended"]
    sys.stdout.write(columns([head, *map(_row, found)]) if found else "there are no jobs\n")
    return EXIT_OK


def show_job(settings: Settings, job: str, *, tenant: str) -> int:
    """Run `headrace jobs show`. Raises CommandError for a job without a result."""

    async def ask(connection: Connection, names: Subjects) -> str:
        client = _client(connection, names, tenant)
        result = await client.peek(job)
        if result is not None:
            return json.dumps(
                {"status": result.status, "tokens": msgspec.to_builtins(result.tokens), **result.line()}, indent=1
            )
        if await client.is_open(job):
            raise CommandError(f"job {job!r} has not ended: headrace jobs watch {job}")
        raise CommandError(f"there is no job {job!r} of this tenant, and no result of one")

    sys.stdout.write(_connected(settings, ask) + "\n")
    return EXIT_OK


def cancel_jobs(settings: Settings, jobs: Sequence[str], *, tenant: str) -> int:
    """Run `headrace jobs cancel`. Raises CommandError for the first job that is not known."""

    async def cancel(connection: Connection, names: Subjects) -> list[str]:
        client = _client(connection, names, tenant)
        try:
            ended: list[str] = [await client.cancel(job) for job in jobs]
            announce(connection, names, "jobs cancel", tenant=client.tenant, jobs=list(jobs))
            return ended
        except UnknownJob as error:
            raise CommandError(str(error)) from None

    for job, status in zip(jobs, _connected(settings, cancel), strict=True):
        sys.stdout.write(f"{job}  {status}\n")
    return EXIT_OK


def watch_jobs(settings: Settings, job: str | None, *, tenant: str) -> int:
    """Run `headrace jobs watch`: print what happens, of one job until it has ended."""

    async def watch(connection: Connection, names: Subjects) -> int:
        client = _client(connection, names, tenant)
        events: asyncio.Queue[Message] = asyncio.Queue(_EVENTS)
        subject = names.job_events(client.tenant, "x").rpartition(".")[0]

        def on_event(message: Message) -> None:
            if not events.full():  # a screen that is too slow misses some, as core subscribers do
                events.put_nowait(message)

        await connection.subscribe(f"{subject}.{job_token(job) if job else '*'}", on_event)
        printing = asyncio.ensure_future(_print(events))
        try:
            if job is None:
                await printing
                return EXIT_OK
            async with client.reading():
                result = await client.result(job)
        finally:
            printing.cancel()
        sys.stdout.write(f"{_now()}  {job}  ended: {result.status}{': ' + result.error if result.error else ''}\n")
        return EXIT_OK if result.ok else EXIT_FAILURE

    return _connected(settings, watch)


async def _print(events: asyncio.Queue[Message]) -> None:
    while True:
        message = await events.get()
        try:
            event = msgspec.json.decode(message.data, type=JobProgress)
        except msgspec.DecodeError:
            continue
        told = f"{event.tokens} tokens" if event.event == "progress" else event.status or event.carrier
        sys.stdout.write(f"{_now()}  {event.id}  {event.event}  {told}\n")
        sys.stdout.flush()


def _now() -> str:
    return time.strftime("%H:%M:%S")


def _row(job: ListedJob) -> list[str]:
    return [job.id, job.status or "open", job.request_class, job.endpoint, job.batch, _when(job.stored), _when(job.finished)]


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z") if at else ""
