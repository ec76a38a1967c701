"""Reads results: decodes them, fetches large ones from the object store, and gives them to those who wait."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from functools import cached_property
from typing import Any

import msgspec
import structlog

from headrace.broker.durable.names import job_token
from headrace.broker.messages.durable import JobProgress, JobResult, JobStatus, ResultResponse, ResultTokens
from headrace.client.errors import ClientError, JobFailed
from headrace.jetstream.client import Connection
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.errors import JetStreamError, StreamTrimmed
from headrace.jetstream.ports import Follow, Message, Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

READ_AGAIN_S = 0.5
LOOK_AGAIN_S = 5.0  # so often a result that is waited for is read, should its message have been missed
READS_AT_ONCE = 64


class Result:
    """The one result of a job. `status_code` and `body` are those of the HTTP answer, also of an error; 0 and None without."""

    def __init__(self, stored: JobResult, response: ResultResponse | None) -> None:
        self.stored = stored
        self.id = stored.id
        self.custom_id = stored.custom_id
        self.status: JobStatus = stored.status
        self.tokens: ResultTokens = stored.tokens
        self.finished = stored.finished  # Unix time
        self.status_code = response.status_code if response is not None else 0
        self._response = response

    def __repr__(self) -> str:
        return f"Result(id={self.id!r}, status={self.status!r}, status_code={self.status_code})"

    @property
    def ok(self) -> bool:
        return self.status == "done"

    @cached_property
    def body(self) -> Any:
        """The decoded JSON body of the answer, or of the error that an HTTP client would have got."""
        return None if self._response is None else msgspec.json.decode(self._response.body)

    @property
    def error(self) -> str:
        """The reason why there is no answer, in words; empty for an answer."""
        if self.ok:
            return ""
        if self.stored.error is not None:
            return self.stored.error.message
        told = self.body.get("error") if isinstance(self.body, dict) else None
        return str(told.get("message", told) if isinstance(told, dict) else told or self.status)

    @property
    def text(self) -> str:
        """The text of the first choice of a chat, completion or response. Raises JobFailed if there is no answer."""
        if not self.ok:
            raise JobFailed(f"job {self.id!r} ended as {self.status}: {self.error}", self.status)
        body = self.body
        for choice in body.get("choices", ()):
            return str((choice.get("message") or {}).get("content") or choice.get("text") or "")
        parts = [part for item in body.get("output", ()) for part in item.get("content") or ()]
        return "".join(str(part.get("text", "")) for part in parts)

    def line(self) -> dict[str, Any]:
        """Return the result as a line of OpenAI's output or error file."""
        response = self._response
        error = self.stored.error
        return {
            "id": f"batch_req_{job_token(self.id)}",
            "custom_id": self.custom_id or self.id,
            "response": None
            if response is None
            else {"status_code": response.status_code, "request_id": response.request_id, "body": self.body},
            "error": None if error is None else {"code": error.code, "message": error.message},
        }


async def load_result(messaging: Messaging, subjects: Subjects, data: bytes) -> Result:
    """Decode a result, and fetch its object if it has one. Raises ClientError for one that cannot be read."""
    try:
        stored = msgspec.json.decode(data, type=JobResult)
        if stored.object is None:
            return Result(stored, stored.response)
        body = await messaging.objects(subjects.bucket("results")).get(stored.object.name)
        if hashlib.sha256(body).hexdigest() != stored.object.digest:
            raise ClientError(f"the object {stored.object.name!r} is not the result of job {stored.id!r}")
        return Result(stored, msgspec.json.decode(body, type=ResultResponse))
    except msgspec.DecodeError as error:
        raise ClientError(f"a result cannot be read: {error}") from error


class ResultReader:
    """Follows the results of one tenant and completes the futures of those who wait, while `run` runs."""

    def __init__(self, messaging: Messaging, subjects: Subjects, tenant: str) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._tenant = tenant
        self._stream = subjects.stream("RESULT")
        self._waiting: dict[str, asyncio.Future[Result]] = {}
        self._waiters: Counter[str] = Counter()
        self._failure: Exception | None = None
        self._gate = asyncio.Semaphore(READS_AT_ONCE)
        self._started = asyncio.Event()

    async def run(self) -> None:
        """Read until cancelled. An error that ends the reading is raised to all who wait."""
        try:
            await self._read()
        except Exception as error:
            log.error("results.not_read", error=str(error))
            self._failure = error
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ClientError(f"results cannot be read: {error}"))

    async def _read(self) -> None:
        pattern = self._subjects.result(self._tenant, "x").rpartition(".")[0] + ".*"
        while True:
            state = await self._state()
            follow = self._messaging.follow(self._stream, pattern, start_seq=state + 1)
            self._started.set()
            try:
                await self._follow(follow)
            except StreamTrimmed as error:  # cleaned up or made again: start behind it
                log.info("results.read_again", reason=str(error))
            finally:
                await follow.close()

    async def _state(self) -> int:
        while True:
            try:
                return (await self._messaging.stream_state(self._stream)).last_seq
            except JetStreamError as error:
                log.info("results.not_read", error=str(error))
                await asyncio.sleep(READ_AGAIN_S)

    async def _follow(self, follow: Follow) -> None:
        while True:
            for message in (await follow.next()).messages:
                future = self._waiting.get(message.subject.rpartition(".")[2])
                if future is not None and not future.done():
                    await self._complete(future, message.data)

    async def _complete(self, future: asyncio.Future[Result], data: bytes) -> None:
        try:
            result = await self._load(data)
        except (ClientError, JetStreamError) as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    async def _look(self, token: str, future: asyncio.Future[Result]) -> None:
        """Read the result of a job. A failure is left to the next look."""
        with contextlib.suppress(JetStreamError):
            async with self._gate:
                found = await self._find(token)
            if found is not None and not future.done():
                await self._complete(future, found)

    async def _find(self, token: str) -> bytes | None:
        found = await self._messaging.subject_messages(self._stream, self._subjects.result(self._tenant, token), limit=1)
        return found[0].data if found else None

    async def _load(self, data: bytes) -> Result:
        return await load_result(self._messaging, self._subjects, data)

    async def peek(self, job: str) -> Result | None:
        """Return the result of a job if it has ended. Raises JetStreamError, ClientError."""
        found = await self._find(job_token(job))
        return None if found is None else await self._load(found)

    async def wait(self, job: str) -> Result:
        """Wait for the result of a job, however long that takes. Raises ClientError for one that cannot be read."""
        await self._started.wait()
        token = job_token(job)
        future = self._waiting.get(token)
        if future is None or future.done():
            future = self._waiting[token] = asyncio.get_running_loop().create_future()
        self._waiters[token] += 1
        try:
            while not future.done() and self._failure is None:
                await self._look(token, future)  # it may have ended before this client began to wait, or while it was cut off
                await asyncio.wait([future], timeout=LOOK_AGAIN_S)
            if not future.done():
                raise ClientError(f"results cannot be read: {self._failure}")
            return future.result()
        finally:
            self._waiters[token] -= 1
            if not self._waiters[token]:
                del self._waiters[token]
                self._waiting.pop(token, None)
                future.cancel()


# Reads results by their names, for the login of a tenant, which may read no stream as a whole.
#
# The end of a job is told once at a subject of the tenant (`hr.jobev.<tenant>.<job>`); the result is read when that is heard,
# and every few seconds in case it was missed.

MOST_HEARD = 4096  # ends that wait to be read; what is over that is found by the next look
READERS = 16


def tenant_of_login(options: ConnectOptions, prefix: str) -> str | None:
    """Return the tenant, as a subject token, that a login is limited to; None for one of another role or without a role."""
    role, _, tenant = (options.steward or "").removeprefix(f"{prefix}.steward.").partition(".")
    return tenant if role == "batch" else None


class NamedResults(ResultReader):
    """The results of one tenant, read one by one over the connection of its login."""

    def __init__(self, connection: Connection, subjects: Subjects, tenant: str) -> None:
        super().__init__(connection, subjects, tenant)
        self._connection = connection
        self._heard: asyncio.Queue[str] = asyncio.Queue(MOST_HEARD)

    async def _read(self) -> None:
        ends = f"{self._subjects.job_events(self._tenant, 'x').rpartition('.')[0]}.*"
        listening = await self._connection.subscribe(ends, self._on_event)
        self._started.set()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(READERS):
                    group.create_task(self._read_heard())
        finally:
            await listening.unsubscribe()

    def _on_event(self, message: Message) -> None:
        try:
            event = msgspec.json.decode(message.data, type=JobProgress)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        token = message.subject.rpartition(".")[2]
        if event.event == "finished" and token in self._waiting and not self._heard.full():
            self._heard.put_nowait(token)

    async def _read_heard(self) -> None:
        while True:
            token = await self._heard.get()
            future = self._waiting.get(token)
            if future is not None and not future.done():
                await self._look(token, future)

    async def _find(self, token: str) -> bytes | None:
        found = await self._connection.last_message(self._stream, self._subjects.result(self._tenant, token))
        return None if found is None else found.data

    async def _load(self, data: bytes) -> Result:
        try:
            stored = msgspec.json.decode(data, type=JobResult)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ClientError(f"a result cannot be read: {error}") from error
        if stored.object is not None:
            raise ClientError(
                f"the result of job {stored.id!r} has {stored.object.size} bytes, more than a message holds, and the login of "
                "a tenant reads messages only: an operator reads it with `headrace jobs show`"
            )
        return Result(stored, stored.response)
