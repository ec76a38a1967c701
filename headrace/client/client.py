"""Connects to a deployment over NATS and submits jobs, with back-pressure, and waits for their results."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.broker.codec import decode
from headrace.broker.durable.errors import JobMalformed
from headrace.broker.durable.names import check_name, job_token
from headrace.broker.durable.stored_job import DEFAULT_ENDPOINT, JOB_CLASSES, parse_job
from headrace.broker.durable.stored_jobs import JobCanceller
from headrace.broker.errors import WireError
from headrace.broker.jobs import new_id
from headrace.broker.messages.durable import (
    HEADER_CLASS,
    HEADER_CUSTOM_ID,
    HEADER_DEADLINE,
    HEADER_ENDPOINT,
    HEADER_JOB,
    HEADER_REPLY,
    HEADER_STREAM,
    JobResult,
    JobStatus,
)
from headrace.broker.models.cards import ModelCard
from headrace.client.errors import NotAllowed, NotConfirmed, NotSubmitted, ResultTimeout, UnknownJob
from headrace.client.results import NamedResults, Result, ResultReader, tenant_of_login
from headrace.jetstream.client import Connection
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, PublishUnknown, QueueFull
from headrace.jetstream.ports import Messaging, StoredMessage
from headrace.jetstream.subjects import DEFAULT_TENANT, Subjects, slug, tenant_token
from headrace.jetstream.topology import LONGEST_DEADLINE_S
from headrace.up.runfile import read_run_file

Priority = Literal["batch", "std", "hi"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A job to submit. `body` is the JSON of an HTTP request; `id` names the job for good: the same id twice is one job.

    `deadline_s`: seconds from now after which the job ends as `expired`, a day by default and seven at most.
    """

    body: Mapping[str, Any]
    id: str = msgspec.field(default_factory=new_id)
    endpoint: str = DEFAULT_ENDPOINT
    priority: Priority = "batch"
    deadline_s: float | None = None
    custom_id: str = ""
    reply: str = ""  # a subject that gets a copy of the result
    durable: bool = False  # the answer's events are stored as they are made


class JobMessage(msgspec.Struct, frozen=True):
    id: str
    model_slug: str
    data: bytes
    headers: dict[str, str]


def as_request(given: Request | Mapping[str, Any], **options: Any) -> Request:
    """Return a request from any form: itself, a line of a batch file, or a body with `options`. Raises NotSubmitted."""
    if isinstance(given, Request):
        return msgspec.structs.replace(given, **options) if options else given
    if isinstance(given.get("body"), Mapping) and "custom_id" in given and "url" in given:
        method, custom_id = given.get("method", "POST"), str(given["custom_id"])
        if method != "POST":
            raise NotSubmitted(f"line {custom_id!r} has the method {method!r}; it must be POST")
        line = {"body": given["body"], "endpoint": str(given["url"]), "custom_id": custom_id, "id": custom_id}
        return Request(**(line | options))
    return Request(body=given, **options)


def message_of(request: Request, *, default_model: str | None = None, now: float | None = None) -> JobMessage:
    """Return the message of a request. `default_model` is for bodies that name none. Raises NotSubmitted."""
    model = request.body.get("model") or default_model
    if not isinstance(model, str):
        raise NotSubmitted(f"job {request.id!r} names no model: its body has {request.body.get('model')!r}")
    if request.priority not in JOB_CLASSES:
        raise NotSubmitted(f"the priority {request.priority!r} is not one of {', '.join(JOB_CLASSES)}")
    deadline_s = request.deadline_s
    if deadline_s is not None and not 0 < deadline_s <= LONGEST_DEADLINE_S:
        raise NotSubmitted(f"a deadline must be above 0 and at most {LONGEST_DEADLINE_S:.0f} s, got {deadline_s!r}")
    try:
        headers = {HEADER_JOB: check_name(request.id), HEADER_ENDPOINT: request.endpoint, HEADER_CLASS: request.priority}
        data = msgspec.json.encode(request.body if request.body.get("model") else {**request.body, "model": model})
    except (JobMalformed, TypeError, ValueError, OverflowError) as error:
        raise NotSubmitted(f"job {request.id[:80]!r} cannot be submitted: {error}") from None
    if deadline_s is not None:
        headers[HEADER_DEADLINE] = f"{(time.time() if now is None else now) + deadline_s:.3f}"
    optional = {HEADER_CUSTOM_ID: request.custom_id, HEADER_REPLY: request.reply, HEADER_STREAM: "1" if request.durable else ""}
    headers |= {name: value for name, value in optional.items() if value}
    if bad := next((value for value in headers.values() if not value.isprintable()), None):
        raise NotSubmitted(f"a header of job {request.id!r} has a character that cannot be sent: {bad[:80]!r}")
    return JobMessage(request.id, slug(model), data, headers)


PAGE = 256  # messages that are read at once
LATEST = 10_000  # of the results of all tenants, how many are looked through first


class ListedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a list. `status` None: it waits or runs. Times are Unix time, 0 where they are not known."""

    id: str
    status: JobStatus | None = None
    endpoint: str = ""
    request_class: str = ""
    batch: str = ""
    durable: bool = False
    stored: float = 0.0
    deadline: float = 0.0
    finished: float = 0.0


async def list_jobs(messaging: Messaging, subjects: Subjects, tenant: str, *, limit: int) -> list[ListedJob]:
    """List jobs that have not ended, oldest first, then the latest results; at most `limit` of each."""
    pattern = f"{subjects.prefix}.job.*.{tenant}"
    waiting = await messaging.subject_messages(subjects.stream("JOB"), pattern, limit=limit)
    ended = [job for message in await _latest(messaging, subjects, tenant, limit) if (job := _ended(message))]
    over = {job.id for job in ended}
    return [*(job for message in waiting if (job := _waiting(message, tenant)).id not in over), *ended]


async def find_open(messaging: Messaging, subjects: Subjects, tenant: str, job: str) -> ListedJob | None:
    """Return a job of the tenant that has not ended, None if there is none of this id. Reads the tenant's queue up to it."""
    stream = subjects.stream("JOB")
    state = await messaging.stream_state(stream)
    pattern = f"{subjects.prefix}.job.*.{tenant}"
    async for message in _between(messaging, stream, pattern, state.first_seq, state.last_seq + 1):
        if (found := _waiting(message, tenant)).id == job:
            return found
    return None


async def _latest(messaging: Messaging, subjects: Subjects, tenant: str, limit: int) -> list[StoredMessage]:
    """Return the latest results of a tenant, oldest first.

    Results of other tenants lie between them, so the stream is looked through from its end in parts, each longer than the last.
    """
    stream = subjects.stream("RESULT")
    state = await messaging.stream_state(stream)
    pattern = f"{subjects.prefix}.result.{tenant}.*"
    found: list[StoredMessage] = []
    end, length = state.last_seq + 1, LATEST
    while end > state.first_seq and len(found) < limit:
        start = max(state.first_seq, end - length)
        part: deque[StoredMessage] = deque(maxlen=limit - len(found))
        async for message in _between(messaging, stream, pattern, start, end):
            part.append(message)
        found = [*part, *found]
        end, length = start, 4 * length
    return found


async def _between(messaging: Messaging, stream: str, pattern: str, start: int, end: int) -> AsyncIterator[StoredMessage]:
    """Yield the messages of a pattern from one sequence on up to another, which is not included; a page is held at a time."""
    while start < end:
        page = await messaging.subject_messages(stream, pattern, limit=PAGE, start_seq=start)
        for message in page:
            if message.seq >= end:
                return
            yield message
        if len(page) < PAGE:
            return
        start = page[-1].seq + 1


def _waiting(message: StoredMessage, tenant: str) -> ListedJob:
    try:
        job = parse_job(message.data, message.headers or {}, tenant=tenant, seq=message.seq, stored=message.at)
    except JobMalformed:
        return ListedJob(id=f"seq-{message.seq}", stored=message.at)
    return ListedJob(
        id=job.name,
        endpoint=job.endpoint,
        request_class=job.request_class,
        batch=job.batch,
        durable=job.durable,
        stored=job.created,
        deadline=job.deadline,
    )


def _ended(message: StoredMessage) -> ListedJob | None:
    try:
        result = msgspec.json.decode(message.data, type=JobResult)
    except msgspec.DecodeError:
        return None
    return ListedJob(id=result.id, status=result.status, stored=0.0, finished=result.finished)


SUBMIT_TRIES = 5
PUBLISH_TIMEOUT_S = 5.0
QUEUE_FULL_RETRY_S = 0.5
DEFAULT_WINDOW = 256

Given = Request | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Options of a client. `window`: jobs of `submit_all` that may be open at once, unless the call says otherwise."""

    tenant: str = DEFAULT_TENANT
    prefix: str = "hr"
    window: int = DEFAULT_WINDOW
    data_dir: Path | None = None  # of a `headrace up` on this machine; default: HEADRACE_DATA_DIR, else .headrace here
    nats: ConnectOptions | None = field(default=None, repr=False)  # credentials, TLS

    def __post_init__(self) -> None:
        if self.window < 1:
            raise NotSubmitted(f"the window must be 1 or more, got {self.window}")


@contextlib.asynccontextmanager
async def connect(url: str | None = None, options: ClientOptions | None = None) -> AsyncIterator[Client]:
    """Connect to the NATS server of a deployment: at `url`, or where the `headrace up` of the data folder runs.

    The login is `options.nats`; else that of the data folder's user, if its `up` runs the server of that address. Raises the
    ConnectError family.
    """
    options = options or ClientOptions()
    prefix, nats = _found(url, options)
    subjects = Subjects(prefix)
    async with await Connection.connect(nats, subjects=subjects) as connection:
        client = client_of(connection, subjects, options)
        async with client.reading():
            yield client


def _found(url: str | None, options: ClientOptions) -> tuple[str, ConnectOptions]:
    """Return the prefix of a deployment, and how to reach it. Raises ConnectError for a context that cannot be read."""
    folder = options.data_dir or Path(os.environ.get("HEADRACE_DATA_DIR") or ".headrace")
    running = read_run_file(folder.resolve()) if options.nats is None or options.data_dir is not None else None
    prefix = options.prefix if running is None or url is not None else running.prefix
    if options.nats is not None:
        return prefix, options.nats
    login, address = ConnectOptions(), url
    if running is not None and (url is None or running.serves([url])):
        address = url or running.nats_url
        login = ConnectOptions.from_context(running.nats_context) if running.nats_context else login
    return prefix, replace(login, servers=(address,) if address else login.servers, name="headrace client")


def client_of(connection: Connection, subjects: Subjects, options: ClientOptions) -> Client:
    """Return a client on a connection. That of a tenant's login speaks for this tenant. Raises NotAllowed for another one."""
    tenant = tenant_of_login(connection.options, subjects.prefix)
    if tenant is None:
        return Client(connection, subjects, options)
    if options.tenant != DEFAULT_TENANT and tenant_token(options.tenant) != tenant:
        raise NotAllowed(f"the login is of the tenant {tenant!r} and cannot speak for {options.tenant!r}")
    return Client(connection, subjects, replace(options, tenant=tenant), NamedResults(connection, subjects, tenant))


class Job:
    def __init__(self, client: Client, job: str, *, known: bool) -> None:
        self._client = client
        self.id = job
        self.known = known  # it was stored before: the same id was submitted a short time ago

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    async def result(self, *, timeout_s: float | None = None) -> Result:
        """Wait for the result. Raises ResultTimeout; the job goes on all the same."""
        return await self._client.result(self.id, timeout_s=timeout_s)

    async def cancel(self) -> JobStatus:
        """End the job as `cancelled` unless it has ended, and return the status that stands."""
        return await self._client.cancel(self.id)


class Client:
    """Jobs of one tenant. Results are read inside `reading`, which `connect` enters."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        options: ClientOptions | None = None,
        results: NamedResults | None = None,
    ) -> None:
        """`results`: for the login of a tenant, which can neither list nor cancel. Its name is a subject token already."""
        self.options = options or ClientOptions()
        self.messaging = messaging
        self.subjects = subjects
        self.tenant = self.options.tenant
        if results is None:
            self.tenant = tenant_token("" if self.options.tenant == DEFAULT_TENANT else self.options.tenant)
        self._limited = results is not None
        self._canceller = JobCanceller(messaging, subjects, wall=time.time)
        self._results = results or ResultReader(messaging, subjects, self.tenant)

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read results inside the `async with`. No task group, so that errors of its body leave it as they are."""
        reading = asyncio.ensure_future(self._results.run())
        try:
            yield
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    # Submitting:

    async def submit(self, request: Given, **options: Any) -> Job:
        """Store a job. From then on it survives every process. The same id twice is one job, whatever the bodies.

        `request` is a `Request`, the body of an HTTP request, or a line of an OpenAI batch file; `options` are the other
        fields of `Request`. A full queue is waited for. Raises NotSubmitted, NotConfirmed.
        """
        wanted = as_request(request, **options)
        default = None if wanted.body.get("model") else await self.only_model()
        message = message_of(wanted, default_model=default)
        duplicate = await self._publish(message)
        return Job(self, message.id, known=duplicate)

    async def _publish(self, message: JobMessage) -> bool:
        subject = self.subjects.job(message.model_slug, self.tenant)
        tries = 0
        while True:
            try:
                ack = await self.messaging.publish(
                    subject,
                    message.data,
                    headers=message.headers,
                    msg_id=f"{self.tenant}.{job_token(message.id)}",
                    timeout_s=PUBLISH_TIMEOUT_S,
                )
            except QueueFull:  # back-pressure: a place becomes free when a job ends
                await asyncio.sleep(QUEUE_FULL_RETRY_S)
            except PublishUnknown as error:
                tries += 1
                if tries == SUBMIT_TRIES:
                    raise NotConfirmed(f"job {message.id!r}: {error}") from error
            except PayloadTooLarge as error:
                raise NotSubmitted(f"job {message.id!r} is too large: {error}") from error
            except JetStreamError as error:
                raise NotSubmitted(f"job {message.id!r}: {error}", retriable=error.retriable) from error
            else:
                return ack.duplicate

    async def only_model(self) -> str:
        """Return the name of the one model that is known. Raises NotSubmitted if there are none or several."""
        if self._limited:
            raise NotSubmitted("the request names no model, and the login of a tenant cannot look which are known: name one")
        entries = await self.messaging.bucket(self.subjects.bucket("models")).entries()
        found = set()
        for entry in entries:
            with contextlib.suppress(WireError):  # one that cannot be read is served by no frontend
                found.add(decode(ModelCard, entry.value).model)
        names = sorted(found)
        if len(names) != 1:
            raise NotSubmitted(f"the request names no model, and {len(names)} are known: {', '.join(names) or 'none'}")
        return names[0]

    async def submit_all(
        self, requests: Iterable[Given] | AsyncIterable[Given], *, window: int | None = None, **options: Any
    ) -> AsyncGenerator[Result]:
        """Submit many jobs, at most `window` open at once, and yield their results as they come, in no order.

        The next request is taken from `requests` only when there is room. Raises as `submit`, after what was submitted before
        has gone on; close the iterator to stop waiting.
        """
        limit = self.options.window if window is None else window
        if limit < 1:
            raise NotSubmitted(f"the window must be 1 or more, got {limit}")
        source = _aiter(requests)
        open_jobs: set[asyncio.Task[Result]] = set()
        more = True
        try:
            while more or open_jobs:
                while more and len(open_jobs) < limit:
                    try:
                        request = as_request(await anext(source), **options)
                    except StopAsyncIteration:
                        more = False
                        break
                    open_jobs.add(asyncio.ensure_future(self._ask(request)))
                if open_jobs:
                    done, open_jobs = await asyncio.wait(open_jobs, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        yield task.result()
        finally:
            for task in open_jobs:
                task.cancel()
            if open_jobs:
                await asyncio.wait(open_jobs)

    async def _ask(self, request: Request) -> Result:
        job = await self.submit(request)
        return await job.result()

    # Results:

    async def result(self, job: str, *, timeout_s: float | None = None) -> Result:
        """Wait for the result of a job, submitted by this client or another one. Raises ResultTimeout."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._results.wait(job)
        except TimeoutError:
            raise ResultTimeout(f"job {job!r} has no result after {timeout_s:g} s; it goes on") from None

    async def wait(self, jobs: Sequence[str], *, timeout_s: float | None = None) -> list[Result]:
        """Wait for the results of several jobs, in their order. Raises ResultTimeout."""
        return list(await asyncio.gather(*(self.result(job, timeout_s=timeout_s) for job in jobs)))

    async def jobs(self, *, limit: int = 100) -> list[ListedJob]:
        """List jobs that have not ended, oldest first, then the latest results; at most `limit` of each.

        Raises NotAllowed for the login of a tenant.
        """
        self._need_all("list jobs")
        return await list_jobs(self.messaging, self.subjects, self.tenant, limit=limit)

    async def cancel(self, job: str) -> JobStatus:
        """End a job as `cancelled` unless it has ended, and return the status that stands: maybe `done`.

        Raises UnknownJob for an id that neither the queue nor the results have, and NotAllowed for the login of a tenant.
        """
        self._need_all("cancel jobs")
        waiting = await find_open(self.messaging, self.subjects, self.tenant, job)
        found = await self.peek(job)  # after the queue: a job leaves that when its result is stored
        if found is not None:
            return found.status
        if waiting is None:
            raise UnknownJob(f"there is no job {job!r} of this tenant, and no result of one")
        return await self._canceller.cancel(self.tenant, job)

    async def peek(self, job: str) -> Result | None:
        """Return the result of a job if it has ended; None if it has not, or is not known."""
        return await self._results.peek(job)

    async def is_open(self, job: str) -> bool:
        """Return True if a job waits or runs. Raises NotAllowed for the login of a tenant."""
        self._need_all("look at the queue")
        return await find_open(self.messaging, self.subjects, self.tenant, job) is not None

    def _need_all(self, what: str) -> None:
        if self._limited:
            raise NotAllowed(f"the login of the tenant {self.tenant!r} cannot {what}; its results can be read by their ids")


async def _aiter(requests: Iterable[Given] | AsyncIterable[Given]) -> AsyncIterator[Given]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
