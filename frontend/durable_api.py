"""Durable streams: plans stored jobs, names their events, and serves `GET /v1/streams/{job}`."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.broker.durable.errors import JobUnknown
from headrace.broker.durable.names import is_made_for, job_token, made_at, name_of_key, new_name
from headrace.broker.durable.stored_job import NewJob
from headrace.broker.durable.stored_jobs import Stretch
from headrace.broker.errors import DeadlineExceeded, JobError, JobFailed, JobWithdrawn, PoisonJob
from headrace.broker.ingress.stream import fault_error
from headrace.broker.messages.durable import JobResult, JobStatus, ResultResponse, StreamEntry
from headrace.broker.messages.frames import JobFault, Row
from headrace.frontend.auth.caller import caller_of, check_model
from headrace.frontend.chat_schema import StreamOptions
from headrace.frontend.errors import BadRequest, ErrorForm, FrontendError, translate
from headrace.frontend.generation.endpoint import Api
from headrace.frontend.generation.job_options import AFFINITY_HEADER, REQUIRE_HEADER, WORKER_HEADER, deadline_of, tier_of
from headrace.frontend.generation.plan import Plan, tenant_in, tenant_of
from headrace.frontend.generation.sse import DONE, KEEPALIVE, StreamWriter, UsageCounter
from headrace.frontend.http.bodies import decode_request, model_name, unsupported
from headrace.frontend.http.exchange import DisconnectWatch, HttpExchange
from headrace.frontend.metrics import Metrics
from headrace.frontend.ports import Models, StoredJobPort
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import slug

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_EVENT = re.compile(r"([A-Za-z0-9_-]{1,64})\.(\d{1,9})\Z", re.ASCII)


def chosen_name(value: str) -> str:
    """Return the name that a client chose for its job. Raises BadRequest."""
    if not is_token(value) or job_token(value) != value:
        raise BadRequest(f"Headrace-Job must be 1 to 64 of A-Z a-z 0-9 _ - and not begin with x-, got {value[:80]!r}")
    return value


def is_token(value: str) -> bool:
    return _TOKEN.match(value) is not None


def event_id(token: str, number: int) -> bytes:
    """Return the id of an event, which a client sends back as `Last-Event-ID`."""
    return b"%b.%d" % (token.encode(), number)


def parse_event_id(value: str) -> tuple[str, int]:
    """Return token and number of an event's id. Raises BadRequest."""
    found = _EVENT.match(value)
    if found is None:
        raise BadRequest(f"Last-Event-ID must be the id of an event of a durable stream, got {value[:80]!r}")
    return found[1], int(found[2])


# Writes the stored events of a durable stream as server-sent events with ids. Pure.

_TYPED = b'{"type":"'  # events of the Responses API and their like have their name in their data, and no mark of the end

_REASONS: dict[str, tuple[type[JobError], str]] = {
    "cancelled": (JobWithdrawn, "the request was cancelled by a call"),
    "expired": (DeadlineExceeded, "the request did not finish before its deadline"),
    "poison": (PoisonJob, "the request crashes its workers and was taken out of service"),
}


class EventLines:
    """Writes stretches of one stream in order."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._typed = False

    def write(self, stretch: Stretch) -> bytes:
        """Return a stretch as server-sent events; with its end those that a client needs to know it by."""
        out = [self._event(stretch.first + i, data) for i, data in enumerate(stretch.events)]
        if stretch.end is not None:
            out.append(self._closing(stretch))
        return b"".join(out)

    def _event(self, number: int, data: bytes) -> bytes:
        name = event_id(self._token, number)
        if data.startswith(_TYPED):
            self._typed = True
            kind = data[len(_TYPED) : data.index(b'"', len(_TYPED))]
            return b"id: %b\nevent: %b\ndata: %b\n\n" % (name, kind, data)
        return b"id: %b\ndata: %b\n\n" % (name, data)

    def _closing(self, stretch: Stretch) -> bytes:
        end = stretch.end
        assert end is not None  # noqa: S101  # the caller asked
        if end.status == "done":
            return b"" if self._typed else DONE
        if stretch.events:  # the carrier's, of which the last one says what happened
            return b""
        error = error_of(end.status, end.fault)
        if self._typed:
            data = msgspec.json.encode(
                {"type": "error", "code": error.code, "message": str(error), "param": None, "sequence_number": stretch.first}
            )
            return b"event: error\ndata: %b\n\n" % data
        return b"data: " + error.body() + b"\n\n"


def error_of(status: JobStatus | None, fault: JobFault | None = None, message: str = "") -> FrontendError:
    """Return the error of a job that has ended without an answer, in the words of `message` if there are some."""
    if fault is not None:
        return translate(fault_error(fault))
    kind, words = _REASONS.get(status or "", (JobFailed, f"the request has ended as {status}"))
    return translate(kind(message or words))


# Writes the errors of a connection that reads a durable stream. They have no id: the stream itself goes on.


class ConnectionEvents(StreamWriter):
    """Stands for the writer of a stream whose events are written elsewhere."""

    open = 0

    def events(self, rows: list[Row]) -> bytes:
        return b""

    def closing(self) -> bytes:
        return b""

    def failure(self, error: FrontendError) -> bytes:
        """Return the event with the reason why this connection ends."""
        return b"data: " + error.body() + b"\n\n"


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

        Raises EndedWithoutAnswer if there is no event, DeadlineExceeded, StreamGone, StreamIncomplete, EventUnknown, a
        JetStreamError.
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
                    try:
                        await self._check_open(tenant, token)
                    except JetStreamError:  # the server is away: the follower goes on when it is back
                        if not begun:
                            raise
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
    return _response(error_of(result.status, message=result.error.message if result.error is not None else ""), result.id)


def _response(error: FrontendError, name: str) -> ResultResponse:
    return ResultResponse(status_code=error.status, request_id=name, body=msgspec.Raw(error.body()))


_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class StreamRoutes:
    """`streams` None = nothing is stored here, so every job is unknown."""

    def __init__(self, streams: DurableStreams | None) -> None:
        self._streams = streams

    def routes(self) -> list[Route]:
        return [Route("/v1/streams/{job}", self.follow, methods=["GET"])]

    async def follow(self, request: Request) -> Response:
        """Send the events after the one in `Last-Event-ID`. Raises JobUnknown, StreamGone, BadRequest."""
        token, tenant = request.path_params["job"], tenant_in(request)
        if self._streams is None or not is_token(token):
            raise JobUnknown(f"there is no job {token[:80]!r}")
        first = _first(request, token)
        await self._streams.check(tenant, token)
        stream = self._streams.stream(tenant, token, first=first)
        try:
            begun = await anext(stream, b"")  # an error must be raised before the status is sent
        except EndedWithoutAnswer as ended:
            response = await self._streams.refusal(tenant, token, ended.end)
            return Response(bytes(response.body), status_code=response.status_code, media_type="application/json")
        headers = {**_HEADERS, "headrace-job": token}
        return StreamingResponse(_joined(begun, stream), media_type="text/event-stream; charset=utf-8", headers=headers)


async def _joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for events in rest:
        yield events


def _first(request: Request, token: str) -> int:
    """Return the number of the first event to send. Raises BadRequest."""
    last = request.headers.get("last-event-id")
    if last is None:
        return 0
    named, number = parse_event_id(last)
    if named != token:
        raise BadRequest(f"Last-Event-ID {last[:80]!r} is of another job than {token!r}")
    return number + 1


# Plans requests that ask for a durable answer: they become a stored job, whose answer is read from what is stored.
#
# A client that comes back with `Last-Event-ID`, to any frontend, gets the events after that one, and nothing runs twice.

DURABLE_HEADER = b"headrace-durable"
JOB_HEADER = b"headrace-job"
LAST_EVENT_HEADER = b"last-event-id"
KEY_HEADER = b"idempotency-key"

_REFUSED = (WORKER_HEADER, REQUIRE_HEADER, AFFINITY_HEADER)
_SWITCH = {"1": True, "true": True, "0": False, "false": False}


class _Asked(msgspec.Struct):
    """The fields of a body that concern its job."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: float | None = None
    service_tier: str | None = None


_decoder = msgspec.json.Decoder(_Asked)
_any_decoder = msgspec.json.Decoder(dict[str, Any])


class DurableApi:
    """Plans requests as `inner` does, except those with the header `Headrace-Durable: 1`."""

    def __init__(
        self,
        inner: Api,
        endpoint: str,
        jobs: StoredJobPort,
        models: Models,
        settings: FrontendSettings,
        metrics: Metrics,
    ) -> None:
        """`endpoint` is the path of `inner`."""
        self._metrics = metrics
        self._inner = inner
        self._endpoint = endpoint
        self._jobs = jobs
        self._models = models
        self._settings = settings
        self._streams = DurableStreams(jobs, settings)

    @property
    def error_form(self) -> ErrorForm:
        return self._inner.error_form

    def plan(self, body: bytes, exchange: HttpExchange) -> Coroutine[Any, Any, Plan]:
        if DURABLE_HEADER in exchange.headers and _is_on(exchange):
            return self._plan(body, exchange)
        return self._inner.plan(body, exchange)

    async def _plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        began, tenant = time.perf_counter(), tenant_of(exchange)
        if (last := exchange.header(LAST_EVENT_HEADER)) is not None:
            token, number = parse_event_id(last)
            await self._streams.check(tenant, token)
            if made_at(token, tenant) is None:  # a client has chosen the name
                await self._jobs.check_request(tenant, token, await self._digest(body))
            return _plan(partial(self._stream, tenant, token, number + 1))
        asked = await decode_request(_decoder, body)
        name = self._name(exchange, tenant)
        is_new = _is_new(exchange)
        digest = "" if is_new else await self._digest(body)
        job = self._job(name, tenant, asked, body, exchange, digest)
        if is_new or not await self._is_stored(tenant, name):
            await self._jobs.publish(job)
            if asked.stream:
                return _plan(partial(self._stream, tenant, name, 0, on_begun=self._first_token(asked, began)))
        else:
            await self._jobs.check_request(tenant, name, digest)
            if asked.stream:
                await self._streams.check(tenant, name)
        return self._answering(tenant, name, stream=bool(asked.stream))

    def _answering(self, tenant: str, name: str, *, stream: bool) -> Plan:
        return _plan(partial(self._stream, tenant, name, 0) if stream else partial(self._whole, tenant, name))

    def _name(self, exchange: HttpExchange, tenant: str) -> str:
        if (chosen := exchange.header(JOB_HEADER)) is not None:
            return chosen_name(chosen)
        if (key := exchange.header(KEY_HEADER)) is not None:
            return name_of_key(tenant, key)
        return new_name(tenant)

    async def _digest(self, body: bytes) -> str:
        """Return what a request is known by when it comes again, however its JSON is written. Raises BadRequest."""
        value = await decode_request(_any_decoder, body)
        return sha256(self._endpoint.encode() + b"\n" + msgspec.json.encode(value, order="deterministic")).hexdigest()

    def _job(self, name: str, tenant: str, asked: _Asked, body: bytes, exchange: HttpExchange, digest: str) -> NewJob:
        """Return the job of a request. Raises BadRequest, UnknownModel."""
        for header in _REFUSED:
            if header in exchange.headers:
                raise unsupported(header.decode(), "is not supported in a durable request: any worker may go on with it")
        model = self._models.get(model_name(asked.model, self._models))
        check_model(exchange.scope, model.adapter or model.card.model)
        request_class = tier_of(asked.service_tier).request_class
        if request_class == "hi" and (caller := caller_of(exchange.scope)) is not None:
            caller.need("priority", f"service_tier {asked.service_tier!r}")
        return NewJob(
            name=name,
            tenant=tenant,
            model_slug=slug(model.card.model),
            endpoint=self._endpoint,
            body=body,
            deadline=time.time() + deadline_of(asked.timeout, exchange, self._settings),
            request_class="hi" if request_class == "hi" else "std",
            durable=bool(asked.stream),
            digest=digest,
        )

    async def _is_stored(self, tenant: str, name: str) -> bool:
        """Return whether a job of this name has begun or ended. One that waits in the queue is published again: one job."""
        return await self._jobs.begun(tenant, name) or await self._jobs.known(tenant, name) is not None

    def _first_token(self, asked: _Asked, began: float) -> Callable[[], None]:
        """Return what observes the first token of a new job. Those who come back to a stream have waited for no token."""
        series = self._metrics.first_token.series(self._models.get(model_name(asked.model, self._models)).card.model)
        return lambda: series.observe(time.perf_counter() - began)

    async def _stream(
        self,
        tenant: str,
        token: str,
        first: int,
        exchange: HttpExchange,
        watch: DisconnectWatch,
        *,
        on_begun: Callable[[], None] | None = None,
    ) -> None:
        exchange.more_headers.append((JOB_HEADER, token.encode()))
        try:
            async with aclosing(self._streams.stream(tenant, token, first=first)) as stream:
                async for events in stream:
                    begins = not exchange.started
                    await exchange.send_events(events)
                    if begins and on_begun is not None:
                        on_begun()
        except EndedWithoutAnswer as ended:
            response = await self._streams.refusal(tenant, token, ended.end)
            watch.stop()
            await exchange.send_json(bytes(response.body), status=response.status_code)
            return
        watch.stop()
        await exchange.send_events(b"", more=False)

    async def _whole(self, tenant: str, token: str, exchange: HttpExchange, watch: DisconnectWatch) -> None:
        exchange.more_headers.append((JOB_HEADER, token.encode()))
        response = await self._streams.answer(tenant, token)
        watch.stop()
        await exchange.send_json(bytes(response.body), status=response.status_code)


def _plan(answer: partial[Coroutine[Any, Any, None]]) -> Plan:
    return Plan([], ConnectionEvents(), UsageCounter([], 1), answer)


def _is_on(exchange: HttpExchange) -> bool:
    value = exchange.header(DURABLE_HEADER) or ""
    try:
        return _SWITCH[value.lower()]
    except KeyError:
        raise BadRequest(f"Headrace-Durable must be 1 or 0, got {value[:80]!r}", param="Headrace-Durable") from None


def _is_new(exchange: HttpExchange) -> bool:
    return JOB_HEADER not in exchange.headers and KEY_HEADER not in exchange.headers
