"""Stored jobs in memory: streams that tests append to, results that they set, and a carrier that runs one job."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from headrace.broker.codec import decode, encode
from headrace.broker.durable.errors import JobNameReused
from headrace.broker.durable.stored_job import NewJob, StoredJob, parse_job
from headrace.broker.durable.stored_jobs import EventFollow
from headrace.broker.messages.durable import JobResult, ResultError, ResultResponse, StreamEntry
from headrace.broker.messages.frames import JobFault
from headrace.frontend.job_renderer import ApiRenderer
from headrace.jetstream.ports import MessageBatch, StoredMessage, StreamState
from tests.support.frontend.fakes import FakeIngress
from tests.support.frontend.jobs import NONCE, rendered, rows_of


class _Follow:
    def __init__(self, entries: list[StoredMessage], more: asyncio.Event) -> None:
        self._entries = entries
        self._more = more
        self.position = 0

    async def next(self) -> MessageBatch:
        while len(self._entries) <= self.position:
            self._more.clear()
            await self._more.wait()
        fresh = self._entries[self.position :]
        self.position = len(self._entries)
        return MessageBatch(fresh, self.position, 0)

    async def close(self) -> None:
        pass


class MemoryJobs:
    """What `StoredJobs` reads and writes. `error` is raised by the next publishes."""

    def __init__(self) -> None:
        self.published: list[NewJob] = []
        self.digests: dict[tuple[str, str], str] = {}
        self.error: Exception | None = None
        self.entries: dict[tuple[str, str], list[StoredMessage]] = defaultdict(list)
        self.results: dict[tuple[str, str], JobResult] = {}
        self.more: dict[tuple[str, str], asyncio.Event] = defaultdict(asyncio.Event)
        self.ended = asyncio.Event()
        self.dropped: list[str] = []
        self._counts: dict[tuple[str, str, str], int] = defaultdict(int)

    # as the port has it

    async def publish(self, job: NewJob) -> None:
        if self.error is not None:
            raise self.error
        if self.digests.setdefault((job.tenant, job.name), job.digest) != job.digest:
            raise JobNameReused(job.name)
        self.published.append(job)

    async def check_request(self, tenant: str, token: str, digest: str) -> None:
        if self.digests.get((tenant, token)) not in (None, "", digest):
            raise JobNameReused(token)

    def events(self, tenant: str, token: str, *, first: int = 0) -> EventFollow:
        return EventFollow(_Stream(self, tenant, token), "RSP", token, first=first)  # type: ignore[arg-type]

    async def begun(self, tenant: str, token: str) -> bool:
        return bool(self.entries.get((tenant, token)))

    async def known(self, tenant: str, token: str) -> JobResult | None:
        return self.results.get((tenant, token))

    async def result(self, tenant: str, token: str) -> JobResult:
        while (found := self.results.get((tenant, token))) is None:
            self.ended.clear()
            await self.ended.wait()
        return found

    async def response(self, result: JobResult) -> ResultResponse | None:
        return result.response

    async def drop(self, result: JobResult) -> None:
        self.dropped.append(result.id)

    async def cancel(self, tenant: str, token: str) -> None:
        if not any(decoded(message).kind == "end" for message in self.entries[tenant, token]):
            self.append(tenant, token, "end", nonce="canceller", status="cancelled", fault=JobFault("cancelled", "cancelled"))
            self.end(tenant, JobResult(id=token, status="cancelled", error=ResultError(code="job_cancelled", message="")))

    # as a carrier does it

    def append(self, tenant: str, token: str, kind: str, *, nonce: str = NONCE, **fields: Any) -> None:
        """Append an entry; `first_event` is found by itself."""
        self._counts[tenant, token, nonce] += 1
        found = self.entries[tenant, token]
        first = sum(len(decoded(message).events) for message in found)
        entry = StreamEntry(nonce=nonce, n=self._counts[tenant, token, nonce], kind=kind, first_event=first, **fields)  # type: ignore[arg-type]
        found.append(StoredMessage(token, len(found) + 1, encode(entry)))
        self.more[tenant, token].set()

    def job(self) -> StoredJob:
        """The job that was published last, as a carrier reads it."""
        new = self.published[-1]
        return parse_job(new.body, new.headers(), tenant=new.tenant, seq=1, stored=1_700_000_000.0)

    def end(self, tenant: str, result: JobResult) -> None:
        self.results[tenant, result.id] = result
        self.ended.set()

    async def carry(self, renderer: ApiRenderer, ingress: FakeIngress, fault: JobFault | None = None) -> None:
        """Run the job that was published last, up to its end."""
        job = self.job()
        answer = await rendered(renderer, job)
        if job.durable:
            self.append(job.tenant, job.token, "take", carrier="i-1")
        for rows in await rows_of(ingress, answer):
            if job.durable:
                self.append(job.tenant, job.token, "rows", rows=rows, events=answer.take(rows))
            else:
                answer.take(rows)
            await asyncio.sleep(0)
        events = await answer.finish() if fault is None else answer.fail(fault)
        status = "done" if fault is None else "failed"
        if job.durable:
            self.append(job.tenant, job.token, "end", events=events, status=status, fault=fault)
        self.end(job.tenant, JobResult(id=job.name, status=status, response=answer.response()))  # type: ignore[arg-type]


class _Stream:
    """The messaging of one stream, as `EventFollow` uses it."""

    def __init__(self, jobs: MemoryJobs, tenant: str, token: str) -> None:
        self._key = (tenant, token)
        self._jobs = jobs

    async def stream_state(self, stream: str, *, subject: str = "") -> StreamState:
        return StreamState(1, 1, 1, "then")

    def follow(self, stream: str, subject: str, *, start_seq: int, batch: int = 128) -> _Follow:
        return _Follow(self._jobs.entries[self._key], self._jobs.more[self._key])


def decoded(message: StoredMessage) -> StreamEntry:
    return decode(StreamEntry, message.data)
