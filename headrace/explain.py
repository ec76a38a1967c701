"""`headrace router explain` and `status`: questions to all live routers, over NATS."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from broker.codec import decode, encode
from broker.errors import WireError
from broker.messages import Candidate, Explain, Explanation, Inspect, Inspection, Record, RouterMember
from headrace.compose import connect_options, subjects
from headrace.errors import EXIT_OK, CommandError, StartFailed
from headrace.logs import configure_tool
from headrace.run import exit_code
from headrace.settings import Settings
from jetstream.client import Connection
from jetstream.errors import JetStreamError
from jetstream.ports import Messaging
from jetstream.subjects import Subjects

T = TypeVar("T")
Answer = TypeVar("Answer", bound=Record)

_ANSWER_TIMEOUT_S = 2.0
_PREFIXES = ("chatcmpl-", "cmpl-")


def explain_request(settings: Settings, request: str, *, as_json: bool) -> int:
    """`headrace router explain`. Raises CommandError when no router knows the request."""
    wanted = request
    for prefix in _PREFIXES:
        wanted = wanted.removeprefix(prefix)

    async def ask(messaging: Messaging, names: Subjects) -> tuple[int, list[Explanation]]:
        routers = await live_routers(messaging, names)
        answers = await _ask_all(messaging, names, routers, Explain(id=wanted), Explanation)
        return len(routers), [answer for _, answer in answers if answer is not None and answer.known]

    asked, known = _with_connection(settings, ask)
    if not asked:
        raise CommandError("no router is running: workers place requests on themselves")
    if not known:
        raise CommandError(f"none of {asked} routers remembers the request {wanted!r}; they keep their last decisions only")
    if as_json:
        sys.stdout.write(json.dumps([msgspec.to_builtins(explanation) for explanation in known], indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(explained(explanation) for explanation in known))
    return EXIT_OK


def show_routers(settings: Settings, *, as_json: bool) -> int:
    """`headrace router status`."""

    async def ask(messaging: Messaging, names: Subjects) -> list[tuple[RouterMember, Inspection | None]]:
        return await _ask_all(messaging, names, await live_routers(messaging, names), Inspect(), Inspection)

    found = _with_connection(settings, ask)
    if as_json:
        rows: list[dict[str, Any]] = [
            {"router": member.router, "pool": member.pool, "state": msgspec.to_builtins(state) if state else None}
            for member, state in found
        ]
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return EXIT_OK
    table = [["router", "pool", "lease", "waiting", "placing", "refusing"]]
    for member, state in found:
        held = ["no answer", "", "", ""]
        if state is not None:
            lease = "draining" if state.draining else "held" if state.lease_held else "lost"
            held = [lease, *(str(state.states.get(name, 0)) for name in ("waiting", "placing", "refusing"))]
        table.append([member.router, member.pool, *held])
    sys.stdout.write(_columns(table) if found else "no router is running: workers place requests on themselves\n")
    return EXIT_OK


async def live_routers(messaging: Messaging, names: Subjects) -> list[RouterMember]:
    """The routers that hold a lease now."""
    entries = await messaging.bucket(names.bucket("members")).entries("router.>")
    return sorted((decode(RouterMember, entry.value) for entry in entries), key=lambda member: (member.pool, member.router))


def explained(told: Explanation) -> str:
    """A decision as a table for people."""
    head = f"{told.id}: {told.state or 'known'}"
    if told.worker:
        head += f" on {told.worker}"
    lines = [
        head,
        f"  by {told.router}, policy {told.policy or 'unknown'}" + (f", reason {told.reason}" if told.reason else ""),
        f"  waited {told.waited_s:.3f} s in the window; predicted time to first token {told.predicted_ttft_s:.3f} s",
    ]
    if not told.candidates:
        return "\n".join([*lines, "  no candidates\n"])
    rows = [["", "worker", "device", "host", "disk", "uncached", "pending", "running", "wait s", "cost s", ""]]
    rows += [_row(candidate, chosen=candidate.worker == told.worker) for candidate in _best_first(told)]
    return "\n".join([*lines, *(f"  {line}" for line in _columns(rows).splitlines())]) + "\n"


def _best_first(told: Explanation) -> list[Candidate]:
    return sorted(told.candidates, key=lambda c: (c.worker != told.worker, bool(c.why_not), not c.room, c.cost_s))


def _row(candidate: Candidate, *, chosen: bool) -> list[str]:
    c = candidate
    numbers = [str(n) for n in (c.device, c.host, c.disk, c.uncached, c.pending, c.running)]
    note = c.why_not or ("" if c.room else "no room")
    return ["→" if chosen else "", c.worker, *numbers, f"{c.wait_s:.3f}", f"{c.cost_s:.3f}", note]


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows)


async def _ask_all(
    messaging: Messaging, names: Subjects, routers: Sequence[RouterMember], question: Record, kind: type[Answer]
) -> list[tuple[RouterMember, Answer | None]]:
    """All at once; one that does not answer in time counts as one that says nothing."""

    async def ask(member: RouterMember) -> Answer | None:
        try:
            answer = await messaging.request(names.control(member.router), encode(question), timeout_s=_ANSWER_TIMEOUT_S)
            return decode(kind, answer)
        except (JetStreamError, WireError):
            return None

    return list(zip(routers, await asyncio.gather(*map(ask, routers)), strict=True))


def _with_connection(settings: Settings, ask: Callable[[Messaging, Subjects], Awaitable[T]]) -> T:
    configure_tool(settings)
    names = subjects(settings)

    async def run() -> T:
        options = connect_options(settings, name="headrace router")
        try:
            async with await Connection.connect(options, subjects=names) as connection:
                return await ask(connection, names)
        except (JetStreamError, WireError) as error:
            failure = StartFailed(str(error))
            failure.exit_code = exit_code(error)
            raise failure from error

    return asyncio.run(run())
