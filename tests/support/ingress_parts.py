"""A judge with one open request, and a connection that records what the parts of an ingress send and store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headrace.broker.codec import encode
from headrace.broker.ingress.cancellation import OpenJob, OpenJobs
from headrace.broker.ingress.inbox import JudgeOutbox
from headrace.broker.ingress.stream import JobStream, RowDispatcher
from headrace.broker.messages.requests import Envelope
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope

SUBJECTS = Subjects("hr")
DEADLINE = 2_000_000_000.0  # Unix time


class StreamReports:
    """The reports of stream readers, as they came."""

    def __init__(self) -> None:
        self.drained: list[str] = []
        self.cancelled: list[str] = []

    def on_drained(self, request_id: str) -> None:
        self.drained.append(request_id)

    def on_cancelled(self, request_id: str) -> None:
        self.cancelled.append(request_id)


class Messages:
    """`sent` and `published` are (subject, body); `stored` are the keys of all buckets; `failing` fails the next publishes."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.published: list[tuple[str, bytes]] = []
        self.headers: list[Mapping[str, str]] = []
        self.stored: dict[str, bytes] = {}
        self.failing: list[Exception] = []

    def bucket(self, name: str) -> Messages:
        return self

    async def get(self, key: str) -> bytes | None:
        await asyncio.sleep(0)
        return self.stored.get(key)

    def send(self, subject: str, data: bytes) -> None:
        self.sent.append((subject, data))

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, **_options: object) -> None:
        if self.failing:
            raise self.failing.pop()
        self.published.append((subject, data))
        self.headers.append(headers or {})


class Parts:
    """One request "r" in pool "p", open and known to the judge."""

    def __init__(self) -> None:
        self.messages = Messages()
        self.tasks = TaskScope()
        self.poisoned: list[tuple[str, int]] = []
        self.outbox = JudgeOutbox(
            self.messages,  # type: ignore[arg-type]  # a stand-in with the methods that parts call
            SUBJECTS,
            lambda record, crashes: self.poisoned.append((record.id, crashes)),
        )
        self.judge = Judge(self.outbox)
        self.open = OpenJobs()
        envelope = Envelope(id="r", pool="p", model="m", judge="j", deadline=DEADLINE, created=0.0, tokens=1)
        dispatcher = RowDispatcher(asyncio.get_running_loop())
        stream = JobStream("r", limit=9, events=StreamReports(), dispatcher=dispatcher)
        self.record = JobRecord("r", "p", 1, stream, 0.0)
        self.judge.open(self.record)
        self.open.add(OpenJob("r", "p", "_", encode(envelope), stream, 1e9, DEADLINE))
