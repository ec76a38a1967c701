"""The endpoint of a generation request: it reads, plans and submits the request, and delivers its answer.

The status is sent with the first rows or with the error in their place, because the outcome is not known before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol, cast

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
from headrace.frontend.ports import JobAnswer, JobPort, UnaryAnswer
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
                    await self._answer(
                        plan, exchange, watch, _Pace(self._metrics, plan.jobs[0].card.model, began, summary, content)
                    )
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

    async def _answer(self, plan: Plan, exchange: HttpExchange, watch: DisconnectWatch, pace: _Pace) -> None:
        model = plan.jobs[0].card.model
        try:
            if len(plan.jobs) == 1:
                answer = await self._port.submit(plan.jobs[0])
                pace.summary.submitted((answer,))
                try:
                    await self._deliver(plan, answer, exchange, watch, pace)
                finally:
                    answer.cancel()
            else:
                answers = await submit_all(self._port, plan.jobs)
                pace.summary.submitted(answers)
                async with MergedAnswer(answers, choices=[job.choices for job in plan.jobs]) as merged:
                    await self._deliver(plan, merged, exchange, watch, pace)
            self._judge(plan, pace, operation(exchange.scope["path"]))
        finally:
            counter = plan.counter
            hold: Hold | None = exchange.scope.get("headrace.hold")
            prompt = counter.prompt
            if hold is not None:
                hold.settle(prompt + counter.completion)
            if counter.completion or counter.ended:
                self._metrics.count_tokens(model, prompt=prompt, cached=counter.cached, output=counter.completion)

    def _judge(self, plan: Plan, pace: _Pace, kind: str) -> None:
        """Count an answer that was given, and by how it compares with the targets. Vectors have no tokens to be late."""
        job, first_token_s, per_token_s = plan.jobs[0], pace.summary.first_token_s, None
        if first_token_s is not None and job.pooling is None:
            later = plan.counter.completion / max(1, sum(job.choices for job in plan.jobs)) - 1
            per_token_s = pace.rest_s / later if later > 0 else None
            level = pace.summary.level = service_level(
                first_token_s=first_token_s,
                per_token_s=per_token_s,
                target_first_s=self._settings.target_first_token_s,
                target_token_s=self._settings.target_token_s,
            )
            self._metrics.count_level(job.card.model, level)
        else:
            first_token_s = None
        took_s = time.perf_counter() - pace.began
        self._metrics.gen_ai.answered(kind, job.card.model, took_s=took_s, first_token_s=first_token_s, per_token_s=per_token_s)

    async def _deliver(
        self, plan: Plan, answer: JobAnswer, exchange: HttpExchange, watch: DisconnectWatch, pace: _Pace
    ) -> None:
        if plan.jobs[0].explain:
            answer = Explained(answer, self._port, plan.jobs[0].id, exchange)
        if isinstance(plan.writer, StreamWriter):
            await self._stream(plan.writer, answer, exchange, watch, pace)
        else:
            await self._collect(plan.writer, answer, exchange, watch, pace)

    async def _stream(
        self, writer: StreamWriter, answer: JobAnswer, exchange: HttpExchange, watch: DisconnectWatch, pace: _Pace
    ) -> None:
        flow = _Flow(writer, exchange, pace)
        events = flow.events(await answer.rows())
        if writer.open or writer.unsettled:  # else the whole answer is here, and its head leaves with it
            await exchange.start_stream(events if writer.open else b"")
        keepalive_s = self._settings.sse_keepalive_s if writer.comments else 0.0
        # isinstance on a protocol would take as long as writing several events
        direct = cast("UnaryAnswer", answer) if not keepalive_s and hasattr(answer, "deliver_to") else None
        while writer.open:
            if direct is not None:
                await direct.deliver_to(flow)
                events = flow.unsent()
                if not writer.open:
                    break
                if events:
                    await exchange.send_events(events)
            events = flow.events(await (self._patient(answer, exchange, keepalive_s) if keepalive_s else answer.rows()))
            if events and writer.open:
                await exchange.send_events(events)
        if writer.unsettled:
            if events:
                await exchange.send_events(events)
                events = b""
            await writer.settle()
        watch.stop()
        await exchange.end_stream(events + writer.closing())

    async def _patient(self, answer: JobAnswer, exchange: HttpExchange, keepalive_s: float) -> list[Row]:
        """Return the next rows. Send a comment whenever they take long enough for a proxy to give up."""
        while True:
            try:
                async with asyncio.timeout(keepalive_s):
                    return await answer.rows()
            except TimeoutError:
                await exchange.send_events(KEEPALIVE)

    async def _collect(
        self, writer: WholeWriter, answer: JobAnswer, exchange: HttpExchange, watch: DisconnectWatch, pace: _Pace
    ) -> None:
        while writer.open:
            rows = await answer.rows()
            if not rows:
                raise Incomplete
            pace.rows(rows)
            writer.take(rows)
        if writer.unsettled:
            await writer.settle()
        watch.stop()
        await exchange.send_whole(writer.body(), [(b"content-type", writer.content_type)])

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


class _Flow:
    """Turns rows into events, and writes them to the socket as long as that is possible without waiting."""

    __slots__ = ("_exchange", "_pace", "_unsent", "_writer")

    def __init__(self, writer: StreamWriter, exchange: HttpExchange, pace: _Pace) -> None:
        self._writer = writer
        self._exchange = exchange
        self._pace = pace
        self._unsent = b""

    def events(self, rows: list[Row]) -> bytes:
        """Return the events of these rows. Raises Incomplete if there are none."""
        if not rows:
            raise Incomplete
        self._pace.rows(rows)
        return self._writer.events(rows)

    def __call__(self, rows: list[Row]) -> bool:
        """Send rows. Returns False if the answer has ended or the client does not read; `unsent` then has their events."""
        self._pace.rows(rows)
        events = self._writer.events(rows)
        if self._writer.open and (not events or self._exchange.push(events)):
            return True
        self._unsent = events
        return False

    def unsent(self) -> bytes:
        """Return the last events if they were not sent, and forget them."""
        events, self._unsent = self._unsent, b""
        return events


class _Pace:
    """Measures the time to the first token and between tokens, as they are sent to the client."""

    __slots__ = ("_content", "_first", "_gap", "_last", "began", "summary")

    def __init__(
        self, metrics: Metrics, model: str, began: float, summary: RequestSummary, content: Content | None = None
    ) -> None:
        self._content = content
        self.summary = summary
        self._first: Series | None = metrics.first_token.series(model)  # None after its observation
        self._gap = metrics.gap.series(model)
        self._last = self.began = began

    @property
    def rest_s(self) -> float:
        return self._last - self.began - (self.summary.first_token_s or 0.0)

    def rows(self, rows: list[Row]) -> None:
        """Observe the time since the rows before these."""
        now = time.perf_counter()
        count = len(rows)
        if self._content is not None:
            self._content.answered(rows)
        gap = (now - self._last) / count
        if self._first is not None:
            self.summary.first_token_s = now - self._last
            self._first.observe(now - self._last)
            self._first = None
            count -= 1
        if count:
            self._gap.observe(gap, count)
        self._last = now
