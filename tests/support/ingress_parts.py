"""A judge with one open request, and a connection that records what the parts of an ingress send and store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headrace.broker.codec import encode
from headrace.broker.ingress.requests import JudgeOutbox, OpenRequest, OpenRequests, RequestOwner
from headrace.broker.ingress.stream import JobStream, RowDispatcher
from headrace.broker.ingress.timeline import Timelines
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import Envelope
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.broker.settings import IngressSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope

SUBJECTS = Subjects("hr")
DEADLINE = 2_000_000_000.0  # Unix time
ALLOWED_S = 1e9


class StreamReports:
    """The reports of stream readers, as they came."""

    def __init__(self) -> None:
        self.drained: list[str] = []
        self.cancelled: list[str] = []
        self.ended: list[str] = []

    def on_drained(self, request_id: str) -> None:
        self.drained.append(request_id)

    def on_cancelled(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def on_ended(self, request_id: str, _fault: JobFault | None) -> None:
        self.ended.append(request_id)


class Spills:
    """The ids of requests whose payloads were kept and deleted."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.forgotten: list[str] = []

    def keep(self, request_id: str) -> None:
        self.kept.append(request_id)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


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
        self.messages = messages = Messages()
        self.tasks = TaskScope()
        self.spills = Spills()
        self.timelines = Timelines("j")
        self.open = OpenRequests(self.timelines, self.spills)  # type: ignore[arg-type]
        self.outbox = JudgeOutbox(messages, SUBJECTS, self.open, self.tasks, retry_s=0.0, wall=lambda: 5.0)  # type: ignore[arg-type]
        self.judge = Judge(self.outbox)
        members = None  # asked for other ingresses only
        settings = IngressSettings()
        self.owner = RequestOwner(
            messages,  # type: ignore[arg-type]  # has the methods that parts call
            SUBJECTS,
            self.judge,
            self.outbox,
            self.open,
            members,  # type: ignore[arg-type]
            ingress="j",
            settings=settings,
        )
        envelope = Envelope(id="r", pool="p", model="m", judge="j", deadline=DEADLINE, created=DEADLINE - ALLOWED_S, tokens=1)
        self.stream = JobStream("r", limit=9, owner=self.owner, dispatcher=RowDispatcher(asyncio.get_running_loop()))
        self.record = JobRecord("r", "p", 1, self.stream, 0.0)
        self.judge.open(self.record)
        self.open.add(OpenRequest("r", "p", "_", encode(envelope), self.stream, ALLOWED_S, DEADLINE))
