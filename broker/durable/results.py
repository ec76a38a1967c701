"""Results of jobs: built, stored by create-once, read, and written from outside for jobs that no job runner can end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import structlog

from headrace.broker.codec import NOT_DECODED
from headrace.broker.durable import metrics
from headrace.broker.durable.errors import CarrierLost, JobRejected
from headrace.broker.durable.names import JobRef, new_nonce
from headrace.broker.durable.stored_job import RenderedJob
from headrace.broker.durable.stream_writer import DurableStreamWriter, JobState, read_stream
from headrace.broker.errors import MalformedMessage
from headrace.broker.messages.durable import JobResult, JobStatus, ResultError, ResultObject, ResultResponse
from headrace.broker.messages.frames import JobFault
from headrace.broker.spill import sha256_hex
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging, Outgoing, PubAck
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope

# Commits the one result of a job by create-once, and reads results.
#
# A publish that names 0 as the last sequence of the subject succeeds once. One that was refused has lost only when a result
# is seen: a full stream refuses in the same way. A result too large for a message lies in an object whose name is new for
# each try.

log = structlog.get_logger()

LARGEST = 508 * 1024  # bytes of a response in a message
RETRY_S = 0.2
LONGEST_RETRY_S = 2.0
PUBLISH_TIMEOUT_S = 2.0


def encode_result(result: JobResult) -> bytes:
    return msgspec.json.encode(result)


def decode_result(data: bytes) -> JobResult:
    """Return a stored result; one that cannot be read is a failed one, because nothing replaces it. Never raises."""
    try:
        return msgspec.json.decode(data, type=JobResult)
    except NOT_DECODED as error:
        log.error("result.malformed", error=str(error))
        return JobResult(id="", status="failed", error=ResultError(code="result_malformed", message=str(error)))


class ResultStore:
    def __init__(self, messaging: Messaging, subjects: Subjects, *, largest: int = LARGEST) -> None:
        """`largest`: bytes of a response that are still stored in the message itself."""
        self._largest = largest
        self._messaging = messaging
        self._subjects = subjects
        self._stream = subjects.stream("RESULT")
        self._objects = messaging.objects(subjects.bucket("results"))

    async def get(self, tenant: str, token: str) -> JobResult | None:
        return (await self.get_many(tenant, [token])).get(token)

    async def get_many(self, tenant: str, tokens: Sequence[str]) -> dict[str, JobResult]:
        """Return the results of these jobs of a tenant, by token, of those that have one. Raises JetStreamError."""
        by_subject = {self._subjects.result(tenant, token): token for token in tokens}
        found = await self._messaging.last_messages(self._stream, list(by_subject))
        return {by_subject[message.subject]: decode_result(message.data) for message in found if message.subject in by_subject}

    async def get_all(self, jobs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], JobResult]:
        """Return the results of jobs, given and returned by tenant and token. Raises JetStreamError."""
        by_subject = {self._subjects.result(tenant, token): (tenant, token) for tenant, token in jobs}
        found = await self._messaging.last_messages(self._stream, list(by_subject))
        return {by_subject[message.subject]: decode_result(message.data) for message in found if message.subject in by_subject}

    async def response(self, result: JobResult) -> ResultResponse | None:
        """Return the response of a result, from its object if it has one. Raises JetStreamError, MalformedMessage."""
        if result.object is None:
            return result.response
        data = await self._objects.get(result.object.name)
        try:
            return msgspec.json.decode(data, type=ResultResponse)
        except NOT_DECODED as error:
            raise MalformedMessage(f"object {result.object.name!r} is no response: {error}") from None

    async def drop(self, result: JobResult) -> None:
        if result.object is not None:
            await self._objects.delete(result.object.name)

    async def commit(self, tenant: str, token: str, result: JobResult) -> JobResult:
        """Store a result unless the job has one, and return the one that stands. It tries until it is cancelled."""
        subject = self._subjects.result(tenant, token)
        own: JobResult | None = None
        data = b""
        wait_s = RETRY_S
        while True:
            try:
                if own is None:
                    own = await self._place(tenant, token, result)
                    data = encode_result(own)
                await self._messaging.publish(subject, data, expect_last_subject_seq=0, timeout_s=PUBLISH_TIMEOUT_S)
            except JetStreamError as error:
                seen = await self._seen(tenant, token)
                if seen is not None:
                    return await self._other(own, seen)
                log.debug("result.retry", subject=subject, error=str(error))
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, LONGEST_RETRY_S)
            else:
                metrics.RESULTS.labels("stored").inc()
                return own

    async def store_all(self, results: Sequence[tuple[str, str, JobResult]]) -> list[bool]:
        """Try once to store results, each given with tenant and token, and return whether each was stored by this.

        `commit` those that were not: another result may be there, its outcome may be unknown, or it needs an object.
        """
        small = [len(r.response.body) <= self._largest if r.response is not None else True for _, _, r in results]
        messages = [
            Outgoing(self._subjects.result(tenant, token), encode_result(result), expect_last_subject_seq=0)
            for fits, (tenant, token, result) in zip(small, results, strict=True)
            if fits
        ]
        outcomes = iter(await self._messaging.publish_all(messages, timeout_s=PUBLISH_TIMEOUT_S))
        stored = [fits and isinstance(next(outcomes), PubAck) for fits in small]
        metrics.RESULTS.labels("stored").inc(sum(stored))
        return stored

    async def _place(self, tenant: str, token: str, result: JobResult) -> JobResult:
        """Return the result as it fits into a message: a large response goes into an object."""
        if result.response is None or len(result.response.body) <= self._largest:
            return result
        body = msgspec.json.encode(result.response)
        name = f"{tenant}.{token}.{secrets.token_hex(8)}"
        digest = await sha256_hex(body)
        await self._objects.put(name, body)
        place = ResultObject(name=name, size=len(body), digest=digest)
        return msgspec.structs.replace(result, response=None, object=place)

    async def _seen(self, tenant: str, token: str) -> JobResult | None:
        try:
            return await self.get(tenant, token)
        except JetStreamError:
            return None

    async def _other(self, own: JobResult | None, seen: JobResult) -> JobResult:
        if own is not None and own == seen:
            metrics.RESULTS.labels("stored").inc()
            return seen
        metrics.RESULTS.labels("other_first").inc()
        if own is not None and own.object is not None and own.object != seen.object:
            try:
                await self._objects.delete(own.object.name)
            except JetStreamError as error:  # the store's own TTL removes it
                log.debug("result.object_left", name=own.object.name, error=str(error))
        return seen


TEXTS: dict[JobStatus, str] = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was cancelled before it was finished.",
    "poison": "This request was taken out of service because it ends the processes that run it.",
}


def error_of(job: JobRef, status: JobStatus, message: str = "") -> ResultError:
    kind = "batch" if job.batch and status in ("expired", "cancelled") else "job"
    return ResultError(code=f"{kind}_{status}", message=message or TEXTS.get(status, f"the job is {status}"))


def without_answer(job: JobRef, status: JobStatus, now: float, message: str = "") -> JobResult:
    error = error_of(job, status, message)
    return JobResult(id=job.name, custom_id=job.custom_id, status=status, error=error, finished=now)


def answered(job: JobRef, rendered: RenderedJob, now: float) -> JobResult:
    return JobResult(
        id=job.name,
        custom_id=job.custom_id,
        status="done",
        response=rendered.response(),
        tokens=rendered.tokens,
        finished=now,
    )


def failed(job: JobRef, rendered: RenderedJob, now: float) -> JobResult:
    """Return the result of a job whose answer was ended with a fault: the error in the form of its API."""
    return msgspec.structs.replace(answered(job, rendered, now), status="failed")


def rejected(job: JobRef, error: JobRejected, now: float) -> JobResult:
    response = ResultResponse(status_code=error.status, request_id=job.id, body=msgspec.Raw(error.body))
    return JobResult(id=job.name, custom_id=job.custom_id, status="failed", response=response, finished=now)


def refused(job: JobRef, *, status_code: int, code: str, message: str, now: float) -> JobResult:
    """Return the result of a job that is refused without its API: an error body as OpenAI has it."""
    body = msgspec.json.encode({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}})
    response = ResultResponse(status_code=status_code, request_id=job.id, body=msgspec.Raw(body))
    return JobResult(id=job.name, custom_id=job.custom_id, status="failed", response=response, finished=now)


def fault_result(job: JobRef, status: JobStatus, fault: JobFault | None, now: float) -> JobResult:
    """Return the result of a stream that ended in a fault, where its answer cannot be made again."""
    if status == "failed" and fault is not None:
        return refused(job, status_code=500, code=fault.code, message=fault.message, now=now)
    return without_answer(job, status, now, fault.message if fault is not None else "")


class ResultLookup:
    """Joins reads of single results. Its questions are bounded by the jobs that are checked at once.

    One read is under way at a time: the faster jobs come, the more of them share one.
    """

    def __init__(self, results: ResultStore, tasks: TaskScope) -> None:
        self._results = results
        self._tasks = tasks
        self._asked: list[tuple[tuple[str, str], asyncio.Future[JobResult | None]]] = []
        self._reading = False

    async def get(self, tenant: str, token: str) -> JobResult | None:
        """Return the result of a job, None if none is seen. Raises JetStreamError."""
        future: asyncio.Future[JobResult | None] = asyncio.get_running_loop().create_future()
        self._asked.append(((tenant, token), future))
        if not self._reading:
            self._reading = True
            self._tasks.spawn(self._read())
        return await future

    async def _read(self) -> None:
        try:
            await asyncio.sleep(0)  # the other jobs of this turn ask first
            while self._asked:
                asked, self._asked = self._asked, []
                await self._answer(asked)
        finally:
            self._reading = False

    async def _answer(self, asked: list[tuple[tuple[str, str], asyncio.Future[JobResult | None]]]) -> None:
        try:
            found = await self._results.get_all([job for job, _ in asked])
        except JetStreamError as error:
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        for job, future in asked:
            if not future.done():  # its job may have been forgotten meanwhile
                future.set_result(found.get(job))


# Ends jobs from outside of their carriers: cancelled ones, overdue ones, and those that no carrier can read or run.
#
# It is the same compare-and-set as a carrier's: of a plain job the create-once of its result, of a durable stream its end
# entry. The writer is told the end that stands.


class _End(NamedTuple):
    """The end of a stream that stands. `own`: it was written here."""

    status: JobStatus | None
    fault: JobFault | None
    own: bool


class OutsideEnds:
    """Writes ends without a renderer and without a lease."""

    def __init__(self, messaging: Messaging, subjects: Subjects, results: ResultStore, *, wall: Callable[[], float]) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._results = results
        self._wall = wall

    async def end(self, job: JobRef, result: JobResult, fault: JobFault | None = None) -> JobStatus:
        """End a job with this result unless it has ended, and return the status that stands. It tries until it is cancelled.

        A stream that has ended as `done` or `failed` may still lack its result, which its carrier makes.
        """
        if not job.durable:
            return (await self._results.commit(job.tenant, job.token, result)).status
        return await self.end_either(job, result, fault)

    async def end_either(self, job: JobRef, result: JobResult, fault: JobFault | None = None) -> JobStatus:
        """End a job of which it is not known whether it is a durable stream, as `end` does: whatever `job.durable` says.

        The end entry decides about a stream. A plain job never has another end there than one from outside, and its carrier may
        have been first with its result.
        """
        ended = await self._end_stream(job, result.status, fault)
        if ended.own:
            return (await self._results.commit(job.tenant, job.token, result)).status
        if ended.status in ("cancelled", "expired", "poison", "malformed"):
            stands = fault_result(job, ended.status, ended.fault, self._wall())
            return (await self._results.commit(job.tenant, job.token, stands)).status
        return ended.status or "failed"

    async def _end_stream(self, job: JobRef, status: JobStatus, fault: JobFault | None) -> _End:
        nonce = new_nonce()
        while True:
            state = await self._read(job)
            if state.end is not None:
                return _End(state.end.status, state.end.fault, own=state.end.nonce == nonce)
            writer = DurableStreamWriter(self._messaging, self._subjects, job.tenant, job.token, nonce=nonce)
            writer.continue_from(state)
            try:
                await writer.append("end", status=status, fault=fault, first_event=state.events)
            except CarrierLost:  # a carrier has gone on: the next read says what the end has to follow
                await asyncio.sleep(RETRY_S)
            else:
                return _End(status, fault, own=True)

    async def _read(self, job: JobRef) -> JobState:
        while True:
            try:
                return await read_stream(self._messaging, self._subjects, job.tenant, job.token)
            except JetStreamError as error:
                log.debug("stream.unread", stored_job=job.id, error=str(error))
                await asyncio.sleep(RETRY_S)
