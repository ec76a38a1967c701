"""Runs `headrace worker status`, `drain` and `role`: queries and commands to live workers over NATS."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import msgspec

from headrace.base.errors import EXIT_OK, CommandError, StartFailed
from headrace.broker.codec import decode, encode
from headrace.broker.messages import Done, Drain, Inspect, Inspection, Record, WorkerMember
from headrace.broker.messages.prefill import SetRole
from headrace.broker.models.card_store import readable_members
from headrace.commands.operating.control_client import ask_all, columns, connected
from headrace.commands.progress import Progress
from headrace.commands.waiting import told_while
from headrace.config.settings import Settings
from headrace.jetstream.errors import NoResponder, RequestTimeout
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

_ANSWER_TIMEOUT_S = 5.0
_LOOK_S = 0.5
_ROLE_MARGIN_S = 15.0  # beyond the grace period: handing over what is left, and the engine's own change


def show_workers(settings: Settings, *, as_json: bool) -> int:
    """Run `headrace worker status`."""

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
        told, answer = await tell_worker(messaging, names, worker, Drain(grace_s=grace_s), timeout_s=_ANSWER_TIMEOUT_S)
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
    """Return whether a worker takes requests, and if not, why."""
    if member.waking:
        return "waking"
    if member.sleeping:
        return f"asleep ({member.sleeping})"
    if member.paused:
        return "paused"
    return "draining" if member.draining else "ready"


async def how_far(messaging: Messaging, names: Subjects, worker: str) -> str:
    """Return what a worker that is being changed is doing now, and what it holds, in a few words."""
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
