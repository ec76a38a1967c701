"""Runs `headrace streams`: plans, applies, shows and purges the streams and buckets of a deployment."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrace.base.errors import EXIT_OK, CommandError
from headrace.commands.control import announce, connected, located_settings
from headrace.commands.groups import add_group
from headrace.commands.progress import size
from headrace.config.build_settings import add_setting_flags
from headrace.jetstream.client import Connection
from headrace.jetstream.provision import StreamPlan, StreamStatus, ensure_topology, plan, pool_stores, purge, status
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

_EXAMPLES = """examples:
  headrace streams plan --nats nats://broker:4222
  headrace streams apply
  headrace streams status --json
  headrace streams purge DLQ --yes
  headrace streams purge REQ --subject 'hr.req.*.std.tenant-a' --yes"""

# What a command does on a connection; returns the text to print.
Action = Callable[[Connection, Topology, argparse.Namespace], Awaitable[str]]


def add_parser(subparsers: Any, about: str) -> None:
    actions = add_group(
        subparsers,
        "streams",
        about=about,
        description="Plan, apply, show or purge the streams, buckets and object stores of a deployment.",
        examples=_EXAMPLES,
    )
    _add(actions, "plan", run_plan, "show what apply would change, field by field")
    _add(actions, "apply", run_apply, "create what is missing and update what differs")
    _add(actions, "status", run_status, "show depth, age, redeliveries and consumers")
    purge_parser = _add(actions, "purge", run_purge, "remove messages for good")
    purge_parser.add_argument("stream", help="which one: REQ, WORK, … or a full name such as HR_REQ")
    purge_parser.add_argument("--subject", help="only messages of this subject or pattern")
    purge_parser.add_argument("--yes", action="store_true", help="do it; without this nothing is removed")


async def run_plan(connection: Connection, topology: Topology, parsed: argparse.Namespace) -> str:
    """Return the changes that apply would make, without making them."""
    plans = await plan(connection, topology)
    return _json([dataclasses.asdict(p) for p in plans]) if parsed.json else plan_table(plans)


async def run_apply(connection: Connection, topology: Topology, parsed: argparse.Namespace) -> str:
    """Create and update streams. Returns what was changed, in the form of the plan."""
    plans = await plan(connection, topology)
    await ensure_topology(connection, topology)
    if changed := [one.stream for one in plans if one.action != "keep"]:
        announce(connection, topology.subjects, "streams apply", changed=changed)
    return _json([dataclasses.asdict(p) for p in plans]) if parsed.json else plan_table(plans, done=True)


async def run_status(connection: Connection, topology: Topology, parsed: argparse.Namespace) -> str:
    """Return the state of the streams, then of the consumers."""
    found = await status(connection, topology)
    return _json([dataclasses.asdict(s) for s in found]) if parsed.json else status_table(found)


async def run_purge(connection: Connection, topology: Topology, parsed: argparse.Namespace) -> str:
    """Remove messages of a stream. Raises CommandError without --yes or for a stream that is not part of the deployment."""
    names = {spec.name for spec in (*topology.all_streams(), *await pool_stores(connection, topology))}
    wanted: str = parsed.stream
    name = wanted if wanted in names else topology.subjects.stream(wanted.upper())
    if name not in names:
        raise CommandError(f"{wanted!r} is no stream of this deployment; there are: {', '.join(sorted(names))}")
    what = f"{name}, subject {parsed.subject}" if parsed.subject else name
    if not parsed.yes:
        raise CommandError(f"this would remove all messages of {what} for good; add --yes to do it")
    count = await purge(connection, name, subject=parsed.subject)
    announce(connection, topology.subjects, "streams purge", stream=name, subject=parsed.subject or "", purged=count)
    if parsed.json:
        return _json({"stream": name, "subject": parsed.subject, "purged": count})
    return f"{count} messages removed from {what}\n"


def plan_table(plans: list[StreamPlan], *, done: bool = False) -> str:
    """Return a line for each stream that changes, with its fields below."""
    verbs = {"create": "created" if done else "create", "update": "updated" if done else "update"}
    lines = []
    for entry in plans:
        if entry.action == "keep":
            continue
        lines.append(f"{verbs[entry.action]:<8} {entry.stream}")
        lines += [f"         {c.name}: {_value(c.current)} → {_value(c.wanted)}" for c in entry.changes]
    kept = sum(1 for entry in plans if entry.action == "keep")
    if done and lines:
        lines.append(f"{len(plans) - kept} changed, {kept} unchanged")
    else:
        lines.append(f"{kept} of {len(plans)} as they should be" + ("" if lines else ", nothing to do"))
    return "\n".join(lines) + "\n"


def status_table(found: list[StreamStatus]) -> str:
    """Return two tables: the streams, and the consumers that read them."""
    rows = [("STREAM", "MESSAGES", "SIZE", "SUBJECTS", "OLDEST", "CONSUMERS")]
    for s in found:
        if s.exists:
            age = _age(s.oldest_age_s)
            rows.append((s.stream, str(s.messages), size(s.bytes), str(s.subjects), age, str(len(s.consumers))))
        else:
            rows.append((s.stream, "missing", "", "", "", ""))
    text = _table(rows)
    consumers = [("STREAM", "CONSUMER", "WAITING", "IN HAND", "REDELIVERED", "OPEN PULLS")]
    consumers += [
        (s.stream, c.name, str(c.waiting_messages), str(c.ack_pending), str(c.redelivered), str(c.open_pulls))
        for s in found
        for c in s.consumers
    ]
    return f"{text}\n{_table(consumers)}" if len(consumers) > 1 else text


def _add(actions: Any, name: str, action: Action, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_setting_flags(parser, "streams")
    parser.set_defaults(run=lambda parsed: _run(parsed, action), prog=f"headrace streams {name}")
    return parser


def _run(parsed: argparse.Namespace, action: Action) -> int:
    async def act(connection: Connection, names: Subjects) -> str:
        return await action(connection, Topology(names, replicas=connection.options.replicas), parsed)

    sys.stdout.write(connected(located_settings(parsed, "streams"), act, name="headrace streams"))
    return EXIT_OK


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def _value(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numbers = {i for i in range(len(rows[0])) if rows[0][i] not in ("STREAM", "CONSUMER")}
    lines = (
        "  ".join(cell.rjust(widths[i]) if i in numbers else cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip()
        for row in rows
    )
    return "\n".join(lines) + "\n"


def _age(age_s: float | None) -> str:
    if age_s is None:
        return "-"
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if age_s >= 2 * length_s:
            return f"{age_s / length_s:.0f}{unit}"
    return f"{age_s:.1f}s"
