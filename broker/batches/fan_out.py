"""Publishes lines of a batch as stored jobs, each under an id made of batch and line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from headrace.broker.batches import metrics
from headrace.broker.batches.errors import InputGone
from headrace.broker.batches.input_copies import InputCopy
from headrace.broker.batches.plan import LinePlan
from headrace.broker.batches.ports import BatchFiles
from headrace.broker.batches.record import BatchRecord, line_name
from headrace.broker.messages import HEADER_BATCH, HEADER_CLASS, HEADER_DEADLINE, HEADER_ENDPOINT, HEADER_JOB
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, PublishUnknown, QueueFull
from headrace.jetstream.ports import Messaging, Outgoing
from headrace.jetstream.subjects import Subjects, slug

IN_FLIGHT = 64  # lines that are published together
IN_FLIGHT_BYTES = 1024 * 1024
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
        names = {number: line_name(record.id, number) for number in lines}
        messages = {
            number: Outgoing(subject, line, {**headers, HEADER_JOB: names[number]}, msg_id=names[number])
            for number, line in lines.items()
        }
        too_large: list[int] = []
        for page in _pages(lines):
            refused = await self._store({number: messages[number] for number in page})
            too_large += [number for number, error in refused.items() if isinstance(error, PayloadTooLarge)]
            if any(isinstance(error, QueueFull) for error in refused.values()):
                metrics.LINES.labels("queue_full").inc()
                return Published(full=True, too_large=tuple(too_large))
        metrics.LINES.labels("published").inc(len(lines))
        return Published(full=False, too_large=tuple(too_large))

    async def _store(self, left: Mapping[int, Outgoing]) -> Mapping[int, JetStreamError]:
        """Store lines together. Returns those that were refused, and why; raises JetStreamError where that is no reason."""
        refused: dict[int, JetStreamError] = {}
        for attempt in range(TRIES):
            outcomes = await self._messaging.publish_all(list(left.values()))
            errors = {number: o for number, o in zip(left, outcomes, strict=True) if isinstance(o, JetStreamError)}
            for number, error in errors.items():
                if isinstance(error, QueueFull | PayloadTooLarge):  # the latter: the server took larger ones at the validation
                    refused[number] = error
                elif not isinstance(error, PublishUnknown) or attempt == TRIES - 1:
                    raise error
            left = {number: left[number] for number, error in errors.items() if isinstance(error, PublishUnknown)}
            if not left:
                break
        return refused


def _pages(lines: Mapping[int, bytes]) -> Iterator[list[int]]:
    """Yield the numbers of lines that are published together."""
    page: list[int] = []
    size = 0
    for number, line in lines.items():
        page.append(number)
        size += len(line)
        if len(page) == IN_FLIGHT or size >= IN_FLIGHT_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page
