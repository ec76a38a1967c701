"""Connects a command to running parts over NATS: one connection, short waits, answers as tables."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from headrace.base import logs
from headrace.base.errors import StartFailed
from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.messages import Record
from headrace.commands.run import exit_code
from headrace.commands.running_deployment import looked_for
from headrace.config.build_settings import connect_options, subjects
from headrace.config.settings import Settings
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError, ServerUnreachable
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

T = TypeVar("T")
Answer = TypeVar("Answer", bound=Record)

_ANSWER_TIMEOUT_S = 2.0
_ANSWER_IDS = (
    "chatcmpl-",
    "cmpl-",
    "msg_",
    "resp_",
    "embd-",
    "classify-",
    "pool-",
    "score-",
    "rerank-",
)  # what the APIs put before the id of a request


def connected(settings: Settings, ask: Callable[[Connection, Subjects], Awaitable[T]], *, name: str) -> T:
    """Run `ask` with a connection, which server reports show as `name`, and return its result.

    Raises CommandError when the connection or `ask` fails; where no server answers it says where its address is from.
    """
    level = settings["log.level"] if settings.given("log.level") else "warning"  # an answer is printed, and the command ends
    logs.configure(log_format=settings["log.format"], level=level, fields={"component": settings.command})
    names = subjects(settings)

    async def run() -> T:
        try:
            async with await Connection.connect(connect_options(settings, name=name), subjects=names) as connection:
                return await ask(connection, names)
        except (JetStreamError, WireError) as error:
            where = looked_for(settings) if isinstance(error, ServerUnreachable) else ""
            failure = StartFailed(f"{error}{where}")
            failure.exit_code = exit_code(error)
            raise failure from error

    return asyncio.run(run())


async def ask_all(
    messaging: Messaging, names: Subjects, parts: Iterable[str], question: Record, kind: type[Answer]
) -> list[Answer | None]:
    """Ask workers or routers at once, by id. Returns None for a part that does not answer in time."""
    return await ask_subjects(messaging, map(names.control, parts), question, kind)


async def ask_subjects(
    messaging: Messaging, subjects: Iterable[str], question: Record, kind: type[Answer]
) -> list[Answer | None]:
    """Ask at all subjects at once. Returns None for each where no answer comes in time."""

    async def ask(subject: str) -> Answer | None:
        try:
            return decode(kind, await messaging.request(subject, encode(question), timeout_s=_ANSWER_TIMEOUT_S))
        except (JetStreamError, WireError):
            return None

    return await asyncio.gather(*map(ask, subjects))


def request_id(text: str) -> str:
    """Return the id of a request, given as such or as the id of its HTTP response."""
    return next((text.removeprefix(prefix) for prefix in _ANSWER_IDS if text.startswith(prefix)), text)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as an aligned text table. The first row names the columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows)
