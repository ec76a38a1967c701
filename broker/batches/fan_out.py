"""Publishes lines of a batch as stored jobs, each under an id made of batch and line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.broker.batches import metrics
from headrace.broker.batches.bounded_concurrency import for_each
from headrace.broker.batches.errors import InputGone
from headrace.broker.batches.input_copies import InputCopy
from headrace.broker.batches.plan import LinePlan
from headrace.broker.batches.ports import BatchFiles
from headrace.broker.batches.record import BatchRecord, line_name
from headrace.broker.messages import HEADER_BATCH, HEADER_CLASS, HEADER_DEADLINE, HEADER_ENDPOINT, HEADER_JOB
from headrace.jetstream.errors import PayloadTooLarge, PublishUnknown, QueueFull
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects, slug

IN_FLIGHT = 64
TRIES = 3  # of a publish whose outcome is unknown, before the batch is read again


class Published(NamedTuple):
    """The outcome of a stretch: `full`, not all lines are stored; `too_large`, lines that fit into no message."""

    full: bool
    too_large: tuple[int, ...]


class FanOut:
    """Reads lines from input files and publishes them."""

    def __init__(self, messaging: Messaging, subjects: Subjects, files: BatchFiles) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._files = files

    async def lines(
        self, record: BatchRecord, plan: LinePlan, numbers: Sequence[int], copy: InputCopy | None = None
    ) -> dict[int, bytes]:
        """Return lines of the input file by their numbers, from its copy if that is whole. Raises InputGone, JetStreamError."""
        if copy is not None and (copied := await copy.lines({number: plan.place(number) for number in numbers})) is not None:
            return copied
        found: dict[int, bytes] = {}
        for start, length, inside in plan.ranges(numbers):
            parts = [p async for p in self._files.read(record.tenant, record.input_file_id, offset=start, length=length)]
            part = b"".join(parts)
            if len(part) != length:
                raise InputGone(f"file {record.input_file_id} has lost bytes {start} to {start + length}")
            for number in inside:
                offset, size = plan.place(number)
                found[number] = part[offset - start : offset - start + size]
        return found

    async def publish(self, record: BatchRecord, lines: Mapping[int, bytes]) -> Published:
        """Publish lines. Raises JetStreamError.

        A repeat is one job with what it repeats: its result is written once.
        """
        subject = self._subjects.job(slug(record.model), record.tenant)
        headers = {
            HEADER_ENDPOINT: record.endpoint,
            HEADER_CLASS: "batch",
            HEADER_DEADLINE: str(record.expires_at),
            HEADER_BATCH: record.id,
        }
        full = False
        too_large: list[int] = []

        async def one(number: int) -> None:
            nonlocal full
            if full:
                return
            name = line_name(record.id, number)
            try:
                await self._store(subject, lines[number], {**headers, HEADER_JOB: name}, name)
            except QueueFull:
                full = True
            except PayloadTooLarge:  # the server took larger messages when the file was validated
                too_large.append(number)

        await for_each(lines, one, at_once=min(IN_FLIGHT, len(lines)))
        metrics.LINES.labels("queue_full" if full else "published").inc(1 if full else len(lines))
        return Published(full=full, too_large=tuple(too_large))

    async def _store(self, subject: str, line: bytes, headers: dict[str, str], name: str) -> None:
        for attempt in range(TRIES):
            try:
                await self._messaging.publish(subject, line, headers=headers, msg_id=name)
            except PublishUnknown:
                if attempt == TRIES - 1:
                    raise
            else:
                return
