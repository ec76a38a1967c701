"""The endpoint of a generation request: it reads, plans and submits the request, and delivers its answer.

The status is sent with the first rows or with the error in their place, because the outcome is not known before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from headrace.broker.errors import SlowClient
from headrace.broker.messages.frames import Row
from headrace.frontend.auth.quotas import Hold, longest_output
from headrace.frontend.errors import Draining, ErrorForm, FrontendError, translate
from headrace.frontend.generation.explain import Explained, MergedAnswer, submit_all
from headrace.frontend.generation.plan import Plan
from headrace.frontend.generation.sse import KEEPALIVE, StreamWriter, WholeWriter
from headrace.frontend.http.exchange import ClientGone, DisconnectWatch, HttpExchange, SlowReader, log_ids
from headrace.frontend.http.loop import forget_frames
from headrace.frontend.metrics import Level, Metrics, Series
from headrace.frontend.ports import JobAnswer, JobPort
from headrace.frontend.request_audit import Content, RequestSummary
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.spans import operation

TOO_MANY_REQUESTS = 429


def service_level(*, first_token_s: float, per_token_s: float | None, target_first_s: float, target_token_s: float) -> Level:
    """Return how an answer compares with its targets; a target of 0 is met by every answer.

    `per_token_s`: the mean time per token after the first; None where there is one token. What is late at first is called that,
    however fast it goes on.
    """
    if 0 < target_first_s < first_token_s:
        return "first_token_late"
    if per_token_s is not None and 0 < target_token_s < per_token_s:
        return "tokens_late"
    return "met"


def counts_as_failed(status: int) -> bool:
    """Return True for an error that is not the client's own: its request was refused for lack of room, or broke here."""
    return status >= 500 or status == TOO_MANY_REQUESTS


log = structlog.get_logger()

LAST_WORDS_S = 1.0


class Api(Protocol):
    """A generating API (chat, completions, …): plans requests and has a form for errors."""

    @property
    def error_form(self) -> ErrorForm: ...

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode and check a body and plan its jobs. Raises a FrontendError or an AdmissionError."""


class Incomplete(FrontendError, status=502, code="incomplete", retriable=True):
    """The answer ended before all its choices did."""


class Lifecycle:
    """The state of the process: while `draining`, it refuses new requests. `load` counts the requests that use an engine."""

    def __init__(self) -> None:
        self.draining = False
        self.load = 0


class GenerationEndpoint:
    def __init__(
        self,
        api: Api,
        port: JobPort,
        settings: FrontendSettings,
        metrics: Metrics,
        lifecycle: Lifecycle,
        *,
        takes_form: bool = False,
    ) -> None:
        """`takes_form`: the body is a form, not JSON."""
        self._lifecycle = lifecycle
        self._api = api
        self._takes_form = takes_form
        self._port = port
        self._settings = settings
        self._metrics = metrics
        self._body_bytes, self._prepare = metrics.body_bytes.series(), metrics.prepare.series()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send)
        if self._lifecycle.draining:
            await exchange.send_error(Draining(retry_after_s=1.0), form=self._api.error_form)
            return
        self._lifecycle.load += 1
        exchange.slow_client_s = self._settings.slow_client_s
        began = time.perf_counter()
        plan: Plan | None = None
        try:
            body = await exchange.read_body(self._settings, json=not self._takes_form)
            self._body_bytes.observe(len(body))
            content: Content | None = scope.get("headrace.content")
            if content is not None:
                content.asked(body)
            async with exchange.watch() as watch:
                plan = await self._api.plan(body, exchange)
                self._prepare.observe(time.perf_counter() - began)
                hold: Hold | None = scope.get("headrace.hold")
                if hold is not None:
                    self._reserve(hold, plan, exchange)
                if (trace := scope.get("headrace.trace")) is not None:
                    plan.jobs[:] = [msgspec.structs.replace(job, trace=trace.headers()) for job in plan.jobs]
                summary = RequestSummary(plan.jobs, plan.counter)
                if plan.jobs:
                    scope["headrace.summary"] = summary
                if plan.detached is not None:
                    await plan.detached(exchange, watch)
                else:
                    await self._answer(plan, exchange, watch, _Delivery(plan, exchange, self._metrics, began, summary, content))
        except SlowReader:
            self._cut(exchange, plan)
        except ClientGone as gone:
            self._metrics.disconnects.inc()
            scope["headrace.outcome"] = "client_gone"
            forget_frames(gone)
        except asyncio.CancelledError:
            # the server's grace period is over: send an error instead of just closing the connection
            with contextlib.suppress(TimeoutError):  # the client does not read
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._fail(exchange, Draining(), plan, began)
        except Exception as error:
            await self._fail(exchange, error, plan, began)
            forget_frames(error)
        finally:
            self._lifecycle.load -= 1

    def _reserve(self, hold: Hold, plan: Plan, exchange: HttpExchange) -> None:
        """Reserve the tokens of the request. Its answer says what is left. Raises QuotaExceeded."""
        prompt = output = 0
        for job in plan.jobs:
            prompt += job.prompt_tokens
            if job.pooling is None:
                output += longest_output(job.max_tokens, job.choices)
        hold.reserve(prompt, output)
        exchange.rate_lines = hold.header_lines(anthropic=exchange.scope["path"].startswith("/v1/messages"))

    async def _answer(self, plan: Plan, exchange: HttpExchange, watch: DisconnectWatch, delivery: _Delivery) -> None:
        job, counter, summary = plan.jobs[0], plan.counter, delivery.summary
        try:
            if len(plan.jobs) == 1:
                answer = await self._port.submit(job)
                summary.submitted((answer,))
                try:
                    await self._deliver(plan, answer, exchange, watch, delivery)
                finally:
                    answer.cancel()
            else:
                answers = await submit_all(self._port, plan.jobs)
                summary.submitted(answers)
                async with MergedAnswer(answers, choices=[job.choices for job in plan.jobs]) as merged:
                    await self._deliver(plan, merged, exchange, watch, delivery)
            self._judge(plan, delivery, operation(exchange.scope["path"]))
        finally:
            hold: Hold | None = exchange.scope.get("headrace.hold")
            if hold is not None:
                hold.settle(counter.prompt + counter.completion)
            if counter.completion or counter.ended:
                self._metrics.count_tokens(
                    job.card.model, prompt=counter.prompt, cached=counter.cached, output=counter.completion
                )

    def _judge(self, plan: Plan, delivery: _Delivery, kind: str) -> None:
        """Count an answer that was given, and by how it compares with the targets. Vectors have no tokens to be late."""
        job, first_token_s, per_token_s = plan.jobs[0], delivery.summary.first_token_s, None
        if first_token_s is not None and job.pooling is None:
            later = plan.counter.completion / (job.choices * len(plan.jobs)) - 1  # per choice, of which all jobs have as many
            per_token_s = (delivery.last - delivery.began - first_token_s) / later if later > 0 else None
            level = delivery.summary.level = service_level(
                first_token_s=first_token_s,
                per_token_s=per_token_s,
                target_first_s=self._settings.target_first_token_s,
                target_token_s=self._settings.target_token_s,
            )
            self._metrics.count_level(job.card.model, level)
        else:
            first_token_s = None
        took_s = time.perf_counter() - delivery.began
        self._metrics.gen_ai.answered(kind, job.card.model, took_s=took_s, first_token_s=first_token_s, per_token_s=per_token_s)

    async def _deliver(
        self, plan: Plan, answer: JobAnswer, exchange: HttpExchange, watch: DisconnectWatch, delivery: _Delivery
    ) -> None:
        if plan.jobs[0].explain:
            answer = Explained(answer, self._port, plan.jobs[0].id, exchange)
        writer = plan.writer
        keepalive_s = self._settings.sse_keepalive_s if isinstance(writer, StreamWriter) and writer.comments else 0.0
        deliver_to = None if keepalive_s else getattr(answer, "deliver_to", None)  # a `JobStream` wakes no task for rows
        while writer.open:
            if deliver_to is not None:
                await deliver_to(delivery)
            if writer.open and not delivery.unsent:
                rows = await (self._patient(answer, exchange, keepalive_s) if keepalive_s else answer.rows())
                if not rows:
                    raise Incomplete
                delivery(rows)
            if writer.open and delivery.unsent:
                await exchange.send_events(delivery.taken())
        if isinstance(writer, WholeWriter):
            if writer.unsettled:
                await writer.settle()
            watch.stop()
            await exchange.send_whole(writer.body(), [(b"content-type", writer.content_type)])
            return
        if writer.unsettled:
            if delivery.unsent:
                await exchange.send_events(delivery.taken())
            await writer.settle()
        watch.stop()
        await exchange.end_stream(delivery.unsent + writer.closing())  # with its head, if the whole answer came at once

    async def _patient(self, answer: JobAnswer, exchange: HttpExchange, keepalive_s: float) -> list[Row]:
        """Return the next rows. Send a comment whenever they take long enough for a proxy to give up."""
        while True:
            try:
                async with asyncio.timeout(keepalive_s):
                    return await answer.rows()
            except TimeoutError:
                await exchange.send_events(KEEPALIVE)

    def _cut(self, exchange: HttpExchange, plan: Plan | None) -> None:
        """Close the connection of a slow reader, whose job has been cancelled by now.

        A stream gets the reason as its last event; other answers have no place for one.
        """
        error = translate(SlowClient(f"the answer was not read for {self._settings.slow_client_s:g} s"))
        exchange.scope["headrace.outcome"] = error.code
        self._metrics.slow_clients.inc()
        log.warning("stream.cut", **log_ids(exchange.scope), reason=str(error))
        writer = plan.writer if plan is not None else None
        exchange.cut(writer.failure(error) if isinstance(writer, StreamWriter) else b"")

    async def _fail(self, exchange: HttpExchange, error: BaseException, plan: Plan | None, began: float) -> None:
        answer = translate(error)
        exchange.scope["headrace.outcome"] = answer.code
        if plan is not None and plan.jobs:
            model, kind = plan.jobs[0].card.model, operation(exchange.scope["path"])
            self._metrics.gen_ai.failed(kind, model, answer.code or "error", took_s=time.perf_counter() - began)
            if plan.jobs[0].pooling is None and counts_as_failed(answer.status):
                self._metrics.count_level(model, "failed")
        if type(answer) is FrontendError:
            log.error("request.crashed", **log_ids(exchange.scope), exc_info=error)
        try:
            if not exchange.started:
                await exchange.send_error(answer, form=self._api.error_form)
            elif plan is not None and isinstance(plan.writer, StreamWriter):
                await exchange.send_events(plan.writer.failure(answer), more=False)
        except SlowReader:
            self._cut(exchange, plan)


class _Delivery:
    """Gives the rows of an answer to its writer, and the events of a stream to the socket while that takes them at once.

    It measures the time to the first rows and between rows. `last`: when the last ones came.
    """

    __slots__ = ("_content", "_exchange", "_first", "_gap", "_push", "_write", "_writer", "began", "last", "summary", "unsent")

    def __init__(
        self,
        plan: Plan,
        exchange: HttpExchange,
        metrics: Metrics,
        began: float,
        summary: RequestSummary,
        content: Content | None = None,
    ) -> None:
        writer, model = plan.writer, plan.jobs[0].card.model
        self._writer = writer
        self._write: Callable[[list[Row]], bytes | None] = writer.events if isinstance(writer, StreamWriter) else writer.take
        self._exchange = exchange
        self._push = exchange.push
        self._content = content
        self._first: Series | None = metrics.first_token.series(model)  # None after its observation
        self._gap = metrics.gap.series(model)
        self.summary = summary
        self.last = self.began = began
        self.unsent = b""  # events that the socket did not take

    def __call__(self, rows: list[Row]) -> bool:
        """Take rows. Returns False if the answer has ended or the client does not read; `unsent` then has their events."""
        now, count = time.perf_counter(), len(rows)
        waited, self.last = now - self.last, now
        gap = waited / count
        if self._content is not None:
            self._content.answered(rows)
        if self._first is not None:
            self.summary.first_token_s = waited
            self._first.observe(waited)
            self._first = None
            count -= 1
        if count:
            self._gap.observe(gap, count)
        events = self._write(rows)
        if self._writer.open and (not events or self._push(events) or self._exchange.begin(events)):
            return True
        self.unsent = events or b""
        return False

    def taken(self) -> bytes:
        """Return the events that were not sent, and forget them."""
        events, self.unsent = self.unsent, b""
        return events
