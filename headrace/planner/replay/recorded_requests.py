"""Reads the requests of the past, from a deployment's placement records or from a file, for a replay of the planner."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from headrace.base.errors import CommandError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import Routed
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.planner.replay.engines import Request

AT_ONCE = 1000


async def read_placements(messaging: Messaging, names: Subjects, *, since_s: float, output: int) -> dict[str, list[Request]]:
    """Return first placements since a Unix time, by queue. Lengths of answers are in no record.

    `output`: tokens that each answer is assumed to have, at most those that it was allowed.
    """
    found: dict[str, list[tuple[float, Routed]]] = {}
    next_seq, stream = 1, names.stream("ROUTE")
    while batch := await messaging.subject_messages(stream, f"{names.prefix}.route.*", limit=AT_ONCE, start_seq=next_seq):
        next_seq = batch[-1].seq + 1
        for message in batch:
            try:
                record = decode(Routed, message.data)
            except WireError:
                continue
            if record.attempt == 1 and record.at - record.waited_s >= since_s:
                queue = message.subject.rpartition(".")[2]
                found.setdefault(queue, []).append((record.at - record.waited_s, record))
    return {
        queue: from_start(
            (at, one.tokens, one.uncached, min(output, one.max_tokens) if one.max_tokens else output) for at, one in records
        )
        for queue, records in found.items()
    }


def read_trace(path: Path) -> list[Request]:
    """Read a CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens, as the Azure traces have them.

    Raises CommandError for a file that is none.
    """
    try:
        with path.open(newline="") as lines:
            return from_start(_row(row) for row in csv.DictReader(lines))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path} is no trace: {type(error).__name__}: {error}") from error


def _row(row: Mapping[str, str]) -> tuple[float, int, int, int]:
    at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
    return at, int(row["ContextTokens"]), int(row["ContextTokens"]), int(row["GeneratedTokens"])


def from_start(rows: Iterable[tuple[float, int, int, int]]) -> list[Request]:
    """Return requests in the order of arrival, with times since the first one."""
    ordered = sorted(rows)
    return [
        Request(at=at - ordered[0][0], prompt=max(1, prompt), uncached=max(0, uncached), output=max(1, output))
        for at, prompt, uncached, output in ordered
    ]
