"""Runs `headrace audit ls`, `follow` and `keep`: the records of requests, and how long they stay."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import UTC, datetime

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import AuditRecord
from headrace.commands.operating.audit import announce
from headrace.commands.operating.control_client import connected
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
