"""Commits the one result of a job by create-once, and reads results.

A publish that names 0 as the last sequence of the subject succeeds once. One that was refused has lost only when a result is
seen: a full stream refuses in the same way. A result too large for a message lies in an object whose name is new for each try.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import msgspec
import structlog

from headrace.broker.codec import NOT_DECODED
from headrace.broker.durable import metrics
from headrace.broker.errors import MalformedMessage
from headrace.broker.messages import JobResult, ResultError, ResultObject, ResultResponse
from headrace.broker.spill import sha256_hex
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging, Outgoing, PubAck
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

LARGEST = 508 * 1024  # bytes of a response in a message
RETRY_S = 0.2
LONGEST_RETRY_S = 2.0
PUBLISH_TIMEOUT_S = 2.0


def encode_result(result: JobResult) -> bytes:
    """Return the result as it is stored."""
    return msgspec.json.encode(result)


def decode_result(data: bytes) -> JobResult:
    """Return a stored result; one that cannot be read is a failed one, because nothing replaces it. Never raises."""
    try:
        return msgspec.json.decode(data, type=JobResult)
    except NOT_DECODED as error:
        log.error("result.malformed", error=str(error))
        return JobResult(id="", status="failed", error=ResultError(code="result_malformed", message=str(error)))


class ResultStore:
    """Reads and writes the results of jobs."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, largest: int = LARGEST) -> None:
        """`largest`: bytes of a response that are still stored in the message itself."""
        self._largest = largest
        self._messaging = messaging
        self._subjects = subjects
        self._stream = subjects.stream("RESULT")
        self._objects = messaging.objects(subjects.bucket("results"))

    async def get(self, tenant: str, token: str) -> JobResult | None:
        """Return the result of a job, None if none is seen. Raises JetStreamError."""
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
        """Delete the object of a result that has one. Raises JetStreamError."""
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
        """Return the result as it fits into a message: with its response in an object if it is large."""
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
        """Return the result that was seen. One's own object is deleted only now: it names another one, or none."""
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
