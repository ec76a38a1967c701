"""Commands to running parts, over NATS."""

from __future__ import annotations

import asyncio
import sys

from broker.codec import decode, encode
from broker.errors import WireError
from broker.messages import Done, Drain, WorkerMember
from headrace.compose import connect_options, subjects
from headrace.errors import EXIT_OK, CommandError, StartFailed
from headrace.logs import configure_tool
from headrace.run import exit_code
from headrace.settings import Settings
from jetstream.client import Connection
from jetstream.errors import JetStreamError, NoResponder
from jetstream.ports import Messaging
from jetstream.subjects import Subjects

_ANSWER_TIMEOUT_S = 5.0


def drain_worker(settings: Settings, worker: str, *, grace_s: float | None) -> int:
    """`headrace worker drain`: returns when the worker has accepted. Raises CommandError."""
    if grace_s is not None and not 0 <= grace_s < float("inf"):
        raise CommandError(f"--grace must be 0 or more seconds, got {grace_s:g}")
    configure_tool(settings)
    return asyncio.run(_drain(settings, worker, grace_s=grace_s))


async def _drain(settings: Settings, worker: str, *, grace_s: float | None) -> int:
    names = subjects(settings)
    try:
        async with await Connection.connect(
            connect_options(settings, name="headrace worker drain"), subjects=names
        ) as connection:
            member = find_worker(worker, await live_workers(connection, names))
            request = encode(Drain(grace_s=grace_s))
            answer = decode(Done, await connection.request(names.control(member.worker), request, timeout_s=_ANSWER_TIMEOUT_S))
    except NoResponder:
        raise StartFailed(f"worker {worker} does not answer: it has just left, or cannot reach the NATS server") from None
    except (JetStreamError, WireError) as error:
        failure = StartFailed(str(error))
        failure.exit_code = exit_code(error)
        raise failure from error
    if not answer.ok:
        raise CommandError(f"worker {member.worker} refused: {answer.message}")
    sys.stdout.write(f"{member.worker} drains{f': {answer.message}' if answer.message else ''}\n")
    return EXIT_OK


async def live_workers(messaging: Messaging, names: Subjects) -> list[WorkerMember]:
    """The workers that hold a lease now."""
    entries = await messaging.bucket(names.bucket("members")).entries("worker.>")
    return sorted((decode(WorkerMember, entry.value) for entry in entries), key=lambda member: member.worker)


def find_worker(wanted: str, live: list[WorkerMember]) -> WorkerMember:
    """The one worker with this id, or with this name (an id is name and start). Raises CommandError naming the live ones."""
    exact = [member for member in live if member.worker == wanted]
    found = exact or [member for member in live if member.worker.rpartition("-")[0] == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        raise CommandError(f"several workers are called {wanted!r}: {', '.join(m.worker for m in found)}; give the full id")
    known = ", ".join(member.worker for member in live) or "none"
    raise CommandError(f"there is no live worker {wanted!r}; live: {known}")
