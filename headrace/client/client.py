"""Connects to a deployment over NATS and submits jobs, with back-pressure, and waits for their results."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.broker.codec import decode
from headrace.broker.durable.cancel import JobCanceller
from headrace.broker.durable.names import job_token
from headrace.broker.errors import WireError
from headrace.broker.messages import JobStatus
from headrace.broker.models.cards import ModelCard
from headrace.client.errors import NotAllowed, NotConfirmed, NotSubmitted, ResultTimeout, UnknownJob
from headrace.client.listing import ListedJob, find_open, list_jobs
from headrace.client.named_results import NamedResults, tenant_of_login
from headrace.client.requests import JobMessage, Request, as_request, message_of
from headrace.client.results import Result, ResultReader
from headrace.jetstream.client import Connection
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge, PublishUnknown, QueueFull
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import DEFAULT_TENANT, Subjects, tenant_token
from headrace.up.runfile import read_run_file

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
    """A job that is stored."""

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
