"""Plans requests that ask for a durable answer: they become a stored job, whose answer is read from what is stored.

A client that comes back with `Last-Event-ID`, to any frontend, gets the events after that one, and nothing runs twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from headrace.broker.durable.client_names import name_of_key, new_name
from headrace.broker.durable.publisher import NewJob
from headrace.frontend.auth.caller import caller_of, check_model
from headrace.frontend.errors import BadRequest, ErrorForm
from headrace.frontend.generation.endpoint import Api
from headrace.frontend.generation.job_options import deadline_of, tier_of
from headrace.frontend.generation.plan import Plan
from headrace.frontend.generation.routing_headers import AFFINITY_HEADER, REQUIRE_HEADER, WORKER_HEADER
from headrace.frontend.generation.tenant import tenant_of
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.field_checks import model_name, unsupported
from headrace.frontend.http.http_exchange import DisconnectWatch, HttpExchange
from headrace.frontend.jobs.durable_streams import DurableStreams, EndedWithoutAnswer
from headrace.frontend.jobs.stream_names import chosen_name, parse_event_id
from headrace.frontend.jobs.stream_writer import ConnectionEvents
from headrace.frontend.metrics import Metrics
from headrace.frontend.ports import Models, StoredJobPort
from headrace.frontend.schema.common import StreamOptions
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.writers.usage import UsageCounter
from headrace.jetstream.subjects import slug

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
        """Decode a body and plan its answer. Raises a FrontendError, an AdmissionError or a JetStreamError."""
        if DURABLE_HEADER in exchange.headers and _is_on(exchange):
            return self._plan(body, exchange)
        return self._inner.plan(body, exchange)

    async def _plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        began, tenant = time.perf_counter(), tenant_of(exchange)
        if (last := exchange.header(LAST_EVENT_HEADER)) is not None:
            token, number = parse_event_id(last)
            await self._streams.check(tenant, token)
            return _plan(partial(self._stream, tenant, token, number + 1))
        asked = await decode_request(_decoder, body)
        name = self._name(exchange, tenant)
        job = self._job(name, tenant, asked, body, exchange)
        if _is_new(exchange) or not await self._is_stored(tenant, name):
            await self._jobs.publish(job)
            if asked.stream:
                return _plan(partial(self._stream, tenant, name, 0, on_begun=self._first_token(asked, began)))
        elif asked.stream:
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

    def _job(self, name: str, tenant: str, asked: _Asked, body: bytes, exchange: HttpExchange) -> NewJob:
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
                    if exchange.started:
                        await exchange.send_events(events)
                    else:
                        await exchange.start_stream(events)
                        if on_begun is not None:
                            on_begun()
        except EndedWithoutAnswer as ended:
            response = await self._streams.refusal(tenant, token, ended.end)
            watch.stop()
            await exchange.send_json(bytes(response.body), status=response.status_code)
            return
        watch.stop()
        if not exchange.started:  # the client had everything but the end
            await exchange.start_stream()
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
