"""Runs `headrace audit ls`, `follow` and `keep`: the records of requests, and how long they stay."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages.operator import AuditRecord
from headrace.commands.control import announce, connected, located_settings
from headrace.commands.groups import add_group
from headrace.config.build_settings import add_setting_flags
from headrace.config.settings import Settings
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import TopologyError
from headrace.jetstream.ports import StoredMessage
from headrace.jetstream.provision import ensure_on_demand, keep_stream
from headrace.jetstream.subjects import Subjects, tenant_token
from headrace.jetstream.topology import AUDIT, Topology

PAGE = 1000
NOTHING = "nothing is recorded: no frontend has run with --audit metadata or --audit content"


def list_records(settings: Settings, *, tenant: str | None, since_s: float, limit: int, as_json: bool) -> int:
    """Run `headrace audit ls`: the last records. Raises CommandError where nothing was ever recorded."""

    async def ask(connection: Connection, names: Subjects) -> list[AuditRecord]:
        pattern = names.audit_records() if tenant is None else names.audit_record(_token(tenant))
        oldest = time.time() - since_s if since_s else 0.0
        found: list[AuditRecord] = []
        start = await _first(connection, names)
        while page := await connection.subject_messages(names.stream(AUDIT), pattern, limit=PAGE, start_seq=start):
            start = page[-1].seq + 1
            found = [*found, *(record for record in map(_read, page) if record is not None and record.at >= oldest)][-limit:]
        return found

    for record in connected(settings, ask, name="headrace audit"):
        _print(record, as_json)
    return EXIT_OK


def follow_records(settings: Settings, *, tenant: str | None, as_json: bool) -> int:
    """Run `headrace audit follow`: print records as they are written, until interrupted. Raises CommandError as `ls` does."""

    async def ask(connection: Connection, names: Subjects) -> None:
        await _first(connection, names)
        pattern = names.audit_records() if tenant is None else names.audit_record(_token(tenant))
        state = await connection.stream_state(names.stream(AUDIT))
        follow = connection.follow(names.stream(AUDIT), pattern, start_seq=state.last_seq + 1)
        try:
            while True:
                for message in (await follow.next()).messages:
                    if (record := _read(message)) is not None:
                        _print(record, as_json)
                sys.stdout.flush()
        finally:
            await asyncio.shield(follow.close())

    connected(settings, ask, name="headrace audit")
    return EXIT_OK


def keep_records(settings: Settings, *, days: float | None, mib: int | None) -> int:
    """Run `headrace audit keep`: say how long and how much the stream keeps. Makes it where it is missing."""
    if days is None and mib is None:
        raise CommandError("say how much is to be kept: --days, --mib or both")
    if (days is not None and not 1 / 24 <= days <= 3650) or (mib is not None and not 1 <= mib <= 2**20):
        raise CommandError("--days must be from an hour (0.042) to 3650, --mib from 1 to 1048576")

    async def ask(connection: Connection, names: Subjects) -> tuple[float, int]:
        spec = Topology(names).audit()
        await ensure_on_demand(connection, spec)
        max_bytes = None if mib is None else mib * 1024 * 1024
        kept = await keep_stream(connection, spec.name, max_age_s=None if days is None else days * 86_400, max_bytes=max_bytes)
        announce(connection, names, "audit keep", days=f"{kept[0] / 86_400:g}", mib=kept[1] // (1024 * 1024))
        return kept

    age_s, most = connected(settings, ask, name="headrace audit")
    sys.stdout.write(f"records are kept for {age_s / 86_400:g} days, and at most {most // (1024 * 1024)} MiB of them\n")
    return EXIT_OK


def _token(tenant: str) -> str:
    return tenant_token("" if tenant == "_" else tenant)


async def _first(connection: Connection, names: Subjects) -> int:
    """Return the first sequence of the stream. Raises CommandError where there is none."""
    try:
        return (await connection.stream_state(names.stream(AUDIT))).first_seq
    except TopologyError:
        raise CommandError(NOTHING) from None


def _read(message: StoredMessage) -> AuditRecord | None:
    try:
        return decode(AuditRecord, message.data)
    except WireError as error:
        sys.stderr.write(f"record {message.seq} cannot be read: {error}\n")
        return None


def _print(record: AuditRecord, as_json: bool) -> None:
    sys.stdout.write((json.dumps(msgspec.to_builtins(record)) if as_json else line(record)) + "\n")


def line(record: AuditRecord) -> str:
    """Return a record in one line, without its content."""
    when = datetime.fromtimestamp(record.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    first = f" first {record.ttft_s:.3f} s" if record.ttft_s is not None else ""
    cached = f" ({record.cached_tokens} cached)" if record.cached_tokens else ""
    by = f" by {', '.join(record.workers)}" if record.workers else ""
    end = record.code or record.finish_reason
    return (
        f"{when}  {record.status} {record.route}  tenant {record.tenant}  key {record.key or '-'}  {record.model or '-'}  "
        f"{record.prompt_tokens}{cached} -> {record.completion_tokens} tokens  {record.took_s:.3f} s{first}{by}"
        f"{f'  {end}' if end else ''}  {record.id}"
    )


EXAMPLES = """examples:
  headrace audit ls --tenant acme --since 24
  headrace audit follow --json                    with their content, where that is recorded
  headrace audit keep --days 90 --mib 2048

Frontends record requests only with --audit metadata or --audit content."""


def add_audit(commands: Any, about: str) -> None:
    actions = add_group(
        commands,
        "audit",
        about=about,
        description="Records of requests, which frontends write that run with --audit metadata or --audit content.",
        examples=EXAMPLES,
    )
    ls = _add(actions, "ls", _run_ls, "list the latest records, oldest first")
    ls.add_argument("--limit", type=int, default=100, metavar="N", help="of them (default: 100)")
    ls.add_argument("--since", type=float, default=0.0, metavar="HOURS", help="only of the last hours")
    follow = _add(actions, "follow", _run_follow, "print records as they are written")
    for parser in (ls, follow):
        parser.add_argument("--tenant", metavar="NAME", help="only of this tenant; _ is that of requests without one")
        parser.add_argument("--json", action="store_true", help="each as a line of JSON, with its content")
    keep = _add(actions, "keep", _run_keep, "say how long records are kept, and how much of them")
    keep.add_argument("--days", type=float, metavar="N", help="for so many days (at the beginning: 30)")
    keep.add_argument("--mib", type=int, metavar="N", help="so many MiB; the oldest make room (at the beginning: 256)")


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    add_setting_flags(parser, "control")
    parser.set_defaults(run=run, prog=f"headrace audit {name}")
    return parser


def _run_ls(parsed: argparse.Namespace) -> int:
    from headrace.base.errors import CommandError

    if parsed.limit < 1:
        raise CommandError(f"--limit must be 1 or more, got {parsed.limit}")
    return list_records(
        located_settings(parsed), tenant=parsed.tenant, since_s=parsed.since * 3600, limit=parsed.limit, as_json=parsed.json
    )


def _run_follow(parsed: argparse.Namespace) -> int:

    return follow_records(located_settings(parsed), tenant=parsed.tenant, as_json=parsed.json)


def _run_keep(parsed: argparse.Namespace) -> int:

    return keep_records(located_settings(parsed), days=parsed.days, mib=parsed.mib)
