"""Connects commands to a running deployment, and runs `headrace worker status`, `drain` and `role`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.base import logs
from headrace.base.errors import EXIT_OK, CommandError, StartFailed
from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Done, Drain, Inspect, Inspection
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.operator import OperatorAct
from headrace.broker.messages.prefill import SetRole
from headrace.broker.messages.requests import Record
from headrace.broker.models.card_store import readable_members
from headrace.commands.progress import Progress, told_while
from headrace.commands.run import exit_code
from headrace.config.build_settings import connect_options, read_settings, subjects
from headrace.config.options import Command
from headrace.config.settings import Settings
from headrace.config.values import MASK
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError, NoResponder, RequestTimeout, ServerUnreachable
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.up.runfile import RunningDeployment, read_run_file, run_file_of

_ADDRESSES = ("nats.url", "nats.context")
_OPERATOR = ("operator",)
_CREDENTIALS = ("nats.user", "nats.token", "nats.credentials", "nats.nkey_seed")


def located_settings(
    parsed: argparse.Namespace, command: Command = "control", *, logins: Sequence[str] = _OPERATOR
) -> Settings:
    """Return the settings of a command line, and of the running `headrace up` what it was not given.

    `logins`: the names that would do at a server that asks for them, the best one first.
    Raises SettingsError, and StartFailed for a run file that cannot be read.
    """
    settings = read_settings(parsed, command)
    if settings["nats.context"]:
        return settings
    running = read_run_file(_data_dir(settings))
    if running is None:
        return settings
    if not settings["nats.url"]:
        return settings.completed(_values(running, logins), str(running.path))
    return _logged_in(settings, running, logins)


def part_settings(settings: Settings, logins: Iterable[str]) -> Settings:
    """Return the settings of a part that was started by hand, with a login where its address is that of the running `up`.

    `logins`: the names that would do, the best one first. Raises StartFailed for a run file that cannot be read.
    """
    if settings["nats.context"] or not settings["nats.url"]:
        return settings
    running = read_run_file(_data_dir(settings))
    return settings if running is None else _logged_in(settings, running, logins)


def _logged_in(settings: Settings, running: RunningDeployment, logins: Iterable[str]) -> Settings:
    """Return settings with the first of these logins, if they lead to this deployment and bring none of their own."""
    if any(settings[key] for key in _CREDENTIALS) or not running.serves(settings["nats.url"]):
        return settings
    context = running.login(logins)
    return settings if context is None else settings.completed({"nats.context": context}, str(running.path))


def looked_for(settings: Settings) -> str:
    """Return the end of the sentence that no server answers: where the address is from, and how to give another one."""
    path = run_file_of(_data_dir(settings))
    if str(path) not in (settings.source(key) for key in _ADDRESSES):
        if _has_address(settings):
            return ""
        return (
            f"; no address was given, and no `headrace up` runs with the data folder {path.parents[1]} (there is no {path}): "
            "give --nats URL or --data-dir PATH"
        )
    running = read_run_file(_data_dir(settings))
    if running is None:
        return f"; the address was in {path}, and its `headrace up` has just ended"
    if not running.alive:
        return f"; the address is from {path}, whose `headrace up` (pid {running.pid}) no longer runs"
    return f"; the address is from {path}, whose `headrace up` (pid {running.pid}) still runs"


def _has_address(settings: Settings) -> bool:
    return any(settings[key] for key in _ADDRESSES)


def _data_dir(settings: Settings) -> Path:
    return Path(settings["data_dir"]).resolve()


def _values(running: RunningDeployment, logins: Iterable[str]) -> dict[str, object]:
    """Return the settings that reach the deployment. What it logs in with is not in its run file, and has to be given."""
    values: dict[str, object] = {"prefix": running.prefix, "namespace": running.namespace}
    if running.nats_context:
        values["nats.context"] = running.login(logins) or running.nats_context
    if running.nats_url:
        values["nats.url"] = tuple(url.replace(f"{MASK}@", "") for url in running.nats_url.split(","))
    return values


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


_TOLD_TIMEOUT_S = 5.0
_LOOK_S = 0.5
_ROLE_MARGIN_S = 15.0  # beyond the grace period: handing over what is left, and the engine's own change


def show_workers(settings: Settings, *, as_json: bool) -> int:
    async def ask(messaging: Messaging, names: Subjects) -> list[tuple[WorkerMember, Inspection | None]]:
        live = await live_workers(messaging, names)
        states = await ask_all(messaging, names, [member.worker for member in live], Inspect(), Inspection)
        return list(zip(live, states, strict=True))

    found = connected(settings, ask, name="headrace worker status")
    if as_json:
        sys.stdout.write(json.dumps([_as_data(member, state) for member, state in found], indent=1) + "\n")
        return EXIT_OK
    table = [["worker", "model", "engine", "role", "can be", "state", "holds"]]
    for member, state in found:
        held = "no answer" if state is None else ", ".join(f"{n} {name}" for name, n in sorted(state.states.items()) if n)
        others = ", ".join(sorted(set(member.roles) - {member.role}))
        table.append([member.worker, member.model, member.engine, member.role, others or "-", _stand(member), held or "-"])
    sys.stdout.write(columns(table) if found else "no worker is running\n")
    return EXIT_OK


def drain_worker(settings: Settings, worker: str, *, grace_s: float | None, wait: bool = False) -> int:
    """Run `headrace worker drain`. Return when the worker has accepted, or with `wait` when it is gone. Raises CommandError."""
    if grace_s is not None:
        check_grace(grace_s)

    async def tell(messaging: Messaging, names: Subjects) -> None:
        told, answer = await tell_worker(messaging, names, worker, Drain(grace_s=grace_s), timeout_s=_TOLD_TIMEOUT_S)
        sys.stdout.write(f"{told} drains{f': {answer.message}' if answer.message else ''}\n")
        sys.stdout.flush()
        if wait:
            await _until_gone(messaging, names, told)
            sys.stdout.write(f"{told} is gone\n")

    connected(settings, tell, name="headrace worker drain")
    return EXIT_OK


async def _until_gone(messaging: Messaging, names: Subjects, worker: str) -> None:
    """Show how many of the worker's requests have ended or moved until it has no lease."""
    held = await _held(messaging, names, worker)
    with Progress(max(1, held), "requests ended or moved") as progress:
        while any(member.worker == worker for member in await live_workers(messaging, names)):
            await asyncio.sleep(_LOOK_S)
            now = await _held(messaging, names, worker)
            progress.update(max(0, held - now))
            held = min(held, now)


async def _held(messaging: Messaging, names: Subjects, worker: str) -> int:
    """Return how many requests a worker holds, 0 where it does not answer."""
    (state,) = await ask_all(messaging, names, [worker], Inspect(), Inspection)
    return sum(state.states.values()) if state is not None else 0


def change_role(settings: Settings, worker: str, role: str, *, grace_s: float) -> int:
    """Run `headrace worker role` and return when the worker serves in its new role. Raises CommandError when it does not."""
    check_grace(grace_s)

    async def tell(messaging: Messaging, names: Subjects) -> tuple[str, Done]:
        command = SetRole(role=role, grace_s=grace_s)
        doing = f"becomes a {role} worker"
        return await tell_worker(messaging, names, worker, command, timeout_s=grace_s + _ROLE_MARGIN_S, doing=doing)

    told, answer = connected(settings, tell, name="headrace worker role")
    sys.stdout.write(f"{answer.message or f'{told} serves as {role}'}\n")
    return EXIT_OK


async def live_workers(messaging: Messaging, names: Subjects) -> list[WorkerMember]:
    """Return the workers that hold a lease now, sorted by id."""
    entries = await messaging.bucket(names.bucket("members")).entries("worker.>")
    return sorted(readable_members(entries), key=lambda member: member.worker)


def find_worker(wanted: str, live: list[WorkerMember]) -> WorkerMember:
    """Return the worker with this id, or with this name (an id is name and start). Raises CommandError naming the live ones."""
    exact = [member for member in live if member.worker == wanted]
    found = exact or [member for member in live if member.worker.rpartition("-")[0] == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        raise CommandError(f"several workers are called {wanted!r}: {', '.join(m.worker for m in found)}; give the full id")
    known = ", ".join(member.worker for member in live) or "none"
    raise CommandError(f"there is no live worker {wanted!r}; live: {known}")


def _stand(member: WorkerMember) -> str:
    if member.waking:
        return "waking"
    if member.sleeping:
        return f"asleep ({member.sleeping})"
    if member.paused:
        return "paused"
    return "draining" if member.draining else "ready"


async def how_far(messaging: Messaging, names: Subjects, worker: str) -> str:
    """Return the progress of a worker that is being changed, and its load, in a few words."""
    found = [member for member in await live_workers(messaging, names) if member.worker == worker]
    if not found:
        return "it has no lease"
    (state,) = await ask_all(messaging, names, [worker], Inspect(), Inspection)
    if state is None:
        return f"{_stand(found[0])}, no answer"
    held = sum(state.states.values())
    return f"{_stand(found[0])}, holds {held} request{'' if held == 1 else 's'}"


async def tell_worker(
    messaging: Messaging, names: Subjects, wanted: str, command: Record, *, timeout_s: float, doing: str = "is told"
) -> tuple[str, Done]:
    """Send a command to a worker and return the worker's id and consent. What it is `doing` is said while that takes time.

    Raises CommandError when there is no such worker, or when it refuses or does not answer.
    """
    member = find_worker(wanted, await live_workers(messaging, names))
    worker, subject = member.worker, names.operate_worker(member.pool, member.worker)
    try:
        asked = messaging.request(subject, encode(command), timeout_s=timeout_s)
        said = await told_while(asked, f"worker {worker} {doing}", lambda: how_far(messaging, names, worker))
        answer = decode(Done, said)
    except NoResponder:
        raise StartFailed(f"worker {worker} does not answer: it has just left, or cannot reach the NATS server") from None
    except RequestTimeout:
        raise StartFailed(
            f"worker {worker} has not answered within {timeout_s:g} s; what became of it: headrace worker status"
        ) from None
    if not answer.ok:
        raise CommandError(f"worker {worker} refused: {answer.message}")
    return worker, answer


def check_grace(grace_s: float) -> None:
    """Raise CommandError for a grace period that is negative or infinite."""
    if not 0 <= grace_s < float("inf"):
        raise CommandError(f"--grace must be 0 or more seconds, got {grace_s:g}")


def _as_data(member: WorkerMember, state: Inspection | None) -> dict[str, Any]:
    shown = ("worker", "pool", "model", "engine", "role", "roles", "draining", "sleeping", "waking", "paused", "slots")
    more = ("handover", "adapters", "host", "pid")
    return {**{name: getattr(member, name) for name in (*shown, *more)}, "state": msgspec.to_builtins(state) if state else None}


# Tells the frontends what an operator's command has changed, so that it stands in their audit logs.


def announce(messaging: Messaging, names: Subjects, command: str, **details: object) -> None:
    """Tell of a command, once and unconfirmed: where no frontend runs, nothing writes it down.

    `details` say what was changed; they must hold no secret and no prompt.
    """
    told = {name: str(value)[:1024] for name, value in details.items()}
    with contextlib.suppress(JetStreamError):
        messaging.send(names.audit(), encode(OperatorAct(command=command, by=user_name(), details=told)))


def user_name() -> str:
    """Return the name of the user who runs this process, empty where it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
