"""Runs `headrace router explain` and `status`: queries to all live routers over NATS."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import (
    Candidate,
    Decided,
    Explain,
    Explanation,
    FleetDecision,
    Inspect,
    Inspection,
    PrefillDecision,
    RouterMember,
)
from headrace.commands.operating.control_client import ask_all, columns, connected, request_id
from headrace.config.settings import Settings
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects


def explain_request(settings: Settings, request: str, *, as_json: bool) -> int:
    """Run `headrace router explain`. Raises CommandError when no router knows the request."""
    wanted = request_id(request)

    async def ask(messaging: Messaging, names: Subjects) -> tuple[int, list[Explanation]]:
        routers = await live_routers(messaging, names)
        answers = await ask_all(messaging, names, _ids(routers), Explain(id=wanted), Explanation)
        return len(routers), [answer for answer in answers if answer is not None and answer.known]

    asked, known = connected(settings, ask, name="headrace router")
    if not asked:
        raise CommandError("no router is running: workers place requests on themselves")
    if not known:
        raise CommandError(f"none of {asked} routers remembers the request {wanted!r}; they keep their last decisions only")
    if as_json:
        sys.stdout.write(json.dumps([msgspec.to_builtins(explanation) for explanation in known], indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(map(explained, chronology(known))))
    return EXIT_OK


def show_routers(settings: Settings, *, as_json: bool) -> int:
    """Run `headrace router status`."""

    async def ask(messaging: Messaging, names: Subjects) -> list[tuple[RouterMember, Inspection | None]]:
        routers = await live_routers(messaging, names)
        states = await ask_all(messaging, names, _ids(routers), Inspect(), Inspection)
        return list(zip(routers, states, strict=True))

    found = connected(settings, ask, name="headrace router")
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
    sys.stdout.write(columns(table) if found else "no router is running: workers place requests on themselves\n")
    return EXIT_OK


async def live_routers(messaging: Messaging, names: Subjects) -> list[RouterMember]:
    """Return the routers that hold a lease now, sorted by pool and id."""
    entries = await messaging.bucket(names.bucket("members")).entries("router.>")
    found = []
    for entry in entries:
        with contextlib.suppress(WireError):  # one that cannot be read answers no question
            found.append(decode(RouterMember, entry.value))
    return sorted(found, key=lambda member: (member.pool, member.router))


def chronology(told: Iterable[Explanation]) -> list[Decided]:
    """Return the decisions of all routers, oldest first: a request that moved was placed more than once."""
    decided: list[Decided] = [one for last in told for one in (*last.earlier, last)]
    return sorted(decided, key=lambda one: (one.at, one.attempt))


def explained(told: Decided) -> str:
    """Return a placement decision as a text table."""
    head = told.id + (f", attempt {told.attempt}" if told.attempt > 1 else "") + f": {told.state or 'known'}"
    if told.worker:
        head += f" on {told.worker}"
    lines = [
        head,
        f"  by {told.router}, policy {told.policy or 'unknown'}" + (f", reason {told.reason}" if told.reason else ""),
        f"  {_times(told)}",
    ]
    if told.name:
        lines.insert(1, f"  the client's id is {told.name}")
    if told.prefill is not None:
        lines.append(f"  prompt computed {_prefilled(told.prefill)}")
    if told.fleet is not None:
        lines.append(f"  {_fleets(told.fleet)}")
    if not told.candidates:
        return "\n".join([*lines, "  no candidates\n"])
    rows = [["", "worker", "device", "host", "disk", "uncached", "pending", "running", "wait s", "cost s", ""]]
    rows += [_row(candidate, chosen=candidate.worker == told.worker) for candidate in _best_first(told)]
    return "\n".join([*lines, *(f"  {line}" for line in columns(rows).splitlines())]) + "\n"


def _times(told: Decided) -> str:
    words = f"waited {told.waited_s:.3f} s in the window, {told.since_arrival_s:.3f} s after the request arrived"
    if told.state == "placed":
        words += f"; predicted first token {max(told.predicted_ttft_s - told.since_arrival_s, 0.0):.3f} s after the placement"
    return words


def _prefilled(decision: PrefillDecision) -> str:
    where = f"by {decision.worker or 'any prefill worker'}" if decision.remote else "by the worker that answers"
    return where + (f", reason {decision.reason}" if decision.reason else "")


def _fleets(decision: FleetDecision) -> str:
    targets = f"targets {decision.ttft_target_s:g} s to the first token, {decision.itl_target_s:g} s between two"
    options = [
        f"{one.fleet} {one.state}" + ("" if one.ttft_s < 0 else f" ({one.ttft_s:.3f} s, {one.itl_s:.3f} s)")
        for one in sorted(decision.options, key=lambda one: one.rank)
    ]
    return f"fleet {decision.fleet}, reason {decision.reason}; {'; '.join([targets, *options])}"


def _best_first(told: Decided) -> list[Candidate]:
    return sorted(told.candidates, key=lambda c: (c.worker != told.worker, bool(c.why_not), not c.room, c.cost_s))


def _row(candidate: Candidate, *, chosen: bool) -> list[str]:
    c = candidate
    numbers = [str(n) for n in (c.device, c.host, c.disk, c.uncached, c.pending, c.running)]
    note = c.why_not or ("" if c.room else "no room")
    return ["→" if chosen else "", c.worker, *numbers, f"{c.wait_s:.3f}", f"{c.cost_s:.3f}", note]


def _ids(routers: list[RouterMember]) -> list[str]:
    return [member.router for member in routers]
