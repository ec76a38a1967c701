"""Reads durable answers for clients: streams from any event on, and whole answers, both from what is stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from headrace.broker.durable.client_names import is_made_for
from headrace.broker.durable.errors import JobUnknown
from headrace.broker.errors import DeadlineExceeded
from headrace.broker.messages import JobResult, ResultResponse, StreamEntry
from headrace.frontend.errors import FrontendError
from headrace.frontend.jobs.stream_events import EventLines, error_of
from headrace.frontend.ports import StoredJobPort
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.writers.sse import KEEPALIVE

MARGIN_S = 60.0  # beyond the longest deadline of a request, for the end to be written
RESULT_S = 30.0  # from the end of a stream to its result
LOOK_AGAIN_S = 0.5
LOOK_S = 10.0  # a stream that was silent this long may have a result and no end


class StreamGone(FrontendError, status=410, code="stream_gone"):
    """The events of a job are not stored, or not any more."""


class EndedWithoutAnswer(Exception):
    """The first thing in a stream is its end without an answer."""

    def __init__(self, end: StreamEntry) -> None:
        super().__init__(end.status)
        self.end = end


class DurableStreams:
    """Durable answers by tenant and token."""

    def __init__(self, jobs: StoredJobPort, settings: FrontendSettings) -> None:
        self._jobs = jobs
        self._patience_s = settings.max_deadline_s + MARGIN_S
        self._keepalive_s = settings.sse_keepalive_s

    async def check(self, tenant: str, token: str) -> None:
        """Raise JobUnknown for a job of which nothing is seen and whose name no frontend made, StreamGone without a stream."""
        if await self._jobs.begun(tenant, token):
            return
        await self._check_open(tenant, token)
        if not is_made_for(token, tenant):
            raise JobUnknown(f"there is no job {token!r}")

    async def stream(self, tenant: str, token: str, *, first: int) -> AsyncGenerator[bytes, None]:
        """Yield the events of a job from number `first` on, as server-sent events. The first bytes come with the first event.

        Raises EndedWithoutAnswer if there is no event, DeadlineExceeded, StreamGone, StreamIncomplete, a JetStreamError.
        """
        lines = EventLines(token)
        source = self._jobs.events(tenant, token, first=first)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._patience_s
        begun = False
        try:
            while True:
                wait_s = min(self._keepalive_s or LOOK_S, LOOK_S) if begun else LOOK_S
                try:
                    async with asyncio.timeout(wait_s):
                        stretch = await source.next()
                except TimeoutError:
                    if loop.time() > until_s:
                        raise DeadlineExceeded(f"job {token!r} has not ended before the longest deadline") from None
                    await self._check_open(tenant, token)
                    if begun and self._keepalive_s:
                        yield KEEPALIVE
                    continue
                end = stretch.end
                if end is not None and end.status != "done" and not begun and not first and not end.rows:
                    raise EndedWithoutAnswer(end)
                begun = True
                if data := lines.write(stretch):
                    yield data
                if end is not None:
                    return
        finally:
            await source.close()

    async def _check_open(self, tenant: str, token: str) -> None:
        """Raise StreamGone for a job that has a result, but no entries."""
        if await self._jobs.known(tenant, token) is None or await self._jobs.begun(tenant, token):
            return
        await asyncio.sleep(LOOK_AGAIN_S)  # with replicas the read may have been old
        if not await self._jobs.begun(tenant, token):
            raise StreamGone(f"job {token!r} has ended, and no events of it are stored")

    async def answer(self, tenant: str, token: str, *, within_s: float | None = None) -> ResultResponse:
        """Wait for the whole answer of a job, also if that is an error. Raises DeadlineExceeded, a JetStreamError."""
        try:
            async with asyncio.timeout(within_s if within_s is not None else self._patience_s):
                result = await self._jobs.result(tenant, token)
                return await self._jobs.response(result) or _refusal(result)
        except TimeoutError:
            raise DeadlineExceeded(f"job {token!r} has no result yet") from None

    async def refusal(self, tenant: str, token: str, end: StreamEntry) -> ResultResponse:
        """Return the answer of a job whose stream has ended without one."""
        try:
            return await self.answer(tenant, token, within_s=RESULT_S)
        except DeadlineExceeded:
            return _response(error_of(end.status, end.fault), token)


def _refusal(result: JobResult) -> ResultResponse:
    """Return the answer to a client whose job has ended without one."""
    return _response(error_of(result.status, message=result.error.message if result.error is not None else ""), result.id)


def _response(error: FrontendError, name: str) -> ResultResponse:
    return ResultResponse(status_code=error.status, request_id=name, body=msgspec.Raw(error.body()))
