"""Decides which requests are traced, and turns those that have ended into spans, away from the path of requests.

An untraced request costs a context and the look at how it ended. A request is kept if it was sampled when it came, or if it
ended in an error, moved, or was late by the targets: all that its spans need was heard anyway.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import structlog

from headrace.broker.ingress.journey import Journey
from headrace.frontend.metrics import Metrics
from headrace.frontend.tracing import names
from headrace.frontend.tracing.context import TraceContext, new_context, new_span_id, read_context
from headrace.frontend.tracing.spans import NS, SpanData, Value, spans_of_story

log = structlog.get_logger()

LATE_S = 1.0  # after the end: workers tell of their last steps in groups
EVERY_S = 0.5
MOST_WAITING = 4096  # ended requests whose spans are not made yet; more are dropped
MOST_AT_ONCE = 256  # of them in one export
COMPLAIN_EVERY_S = 60.0
CLIENT_GONE = "client_gone"
TOO_MANY_REQUESTS = 429


class Exporter(Protocol):
    """Sends spans."""

    async def export(self, spans: Sequence[SpanData]) -> bool:
        """Return whether they were taken. Must not raise."""

    async def close(self) -> None: ...


class Story(Protocol):
    """The fields of a request's log line, and the journeys of its jobs."""

    level: Any
    first_token_s: float | None

    @property
    def model(self) -> str: ...

    @property
    def journeys(self) -> list[Journey]: ...

    def fields(self) -> dict[str, Any]: ...


class Begun(msgspec.Struct, frozen=True):
    """The trace of a request that runs. `span` is that of the request here."""

    context: TraceContext
    span: int
    began_ns: int

    def headers(self) -> dict[str, str]:
        """Return the W3C headers for what works on the request."""
        return self.context.headers(self.span)


class _Ended(msgspec.Struct, frozen=True):
    """A request whose spans are to be made at `due_s` of the event loop's time."""

    due_s: float
    root: SpanData
    context: TraceContext
    journeys: Sequence[Journey]


class Tracer:
    """The traces of one frontend."""

    def __init__(
        self,
        exporter: Exporter,
        metrics: Metrics,
        *,
        sample: float,
        frontend: str,
        late_s: float = LATE_S,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """`sample`: the share of requests whose client does not say whether to trace them. `frontend`: the id in spans.

        `clock`: nanoseconds.
        """
        self._exporter = exporter
        self._metrics = metrics
        self._sample = sample
        self._frontend = frontend
        self._late_s = late_s
        self._clock_ns = clock
        self._waiting: deque[_Ended] = deque()
        self._outcomes = {
            outcome: metrics.traces.labels(outcome)
            for outcome in ("sampled", "kept", "not_sampled", "dropped", "exported", "failed")
        }
        self._complained_s = -COMPLAIN_EVERY_S

    def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> Begun:
        """Begin the trace of a request, below that of its client if its headers name one."""
        return Begun(read_context(headers) or new_context(self._sample), new_span_id(), self._clock_ns())

    def end(self, trace: Begun, scope: Any, *, route: str, status: int, code: str | None) -> None:
        """End the trace of a request, and keep it if it was sampled or its end is worth it."""
        story: Story | None = scope.get("headrace.story")
        if trace.context.sampled:
            outcome = "sampled"
        elif _went_wrong(status, code) or (story is not None and _remarkable(story)):
            outcome = "kept"
        else:
            self._outcomes["not_sampled"].inc()
            return
        self._outcomes[outcome].inc()
        if len(self._waiting) >= MOST_WAITING:
            self._outcomes["dropped"].inc()
            return
        root = self._root(trace, scope, story, route=route, status=status, code=code)
        self._metrics.show_trace(
            root.trace,
            route=route,
            took_s=(root.end_ns - root.begin_ns) / NS,
            model=story.model if story is not None else "",
            first_token_s=story.first_token_s if story is not None else None,
        )
        due_s = asyncio.get_running_loop().time() + self._late_s
        self._waiting.append(_Ended(due_s, root, trace.context, story.journeys if story is not None else ()))

    def _root(self, trace: Begun, scope: Any, story: Story | None, *, route: str, status: int, code: str | None) -> SpanData:
        about: dict[str, Value] = {
            names.OPERATION: names.operation(route),
            names.PROVIDER: "headrace",
            names.METHOD: scope["method"],
            names.ROUTE: route,
            names.STATUS: status,
            names.REQUEST_ID: scope["headrace.request_id"],
        }
        if (client_id := scope.get("headrace.client_request_id")) is not None:
            about[names.CLIENT_REQUEST_ID] = client_id
        if code is not None:
            about[names.ERROR_TYPE] = code
        model = ""
        if story is not None:
            fields = story.fields()
            model = str(fields.get("model", ""))
            about |= {attribute: fields[name] for name, attribute in _FIELDS.items() if name in fields}
            if "finish_reason" in fields:
                about[names.FINISH_REASONS] = fields["finish_reason"].split(",")
            if story.level is not None:
                about[names.LEVEL] = story.level
        return SpanData(
            name=f"{names.operation(route)} {model}".rstrip(),
            trace=trace.context.trace,
            id=trace.span,
            parent=trace.context.span,
            remote_parent=trace.context.span != 0,
            begin_ns=trace.began_ns,
            end_ns=max(trace.began_ns, self._clock_ns()),
            service="headrace-frontend",
            instance=self._frontend,
            kind="server",
            attributes=about,
            error=(code or f"HTTP {status}") if _went_wrong(status, code) else "",
        )

    async def run(self) -> None:
        """Export until cancelled; then what waits is sent once."""
        try:
            while True:
                await asyncio.sleep(EVERY_S)
                while self._waiting and self._waiting[0].due_s <= asyncio.get_running_loop().time():
                    await self._export(self._take(asyncio.get_running_loop().time()))
        finally:
            if self._waiting:
                await self._export(self._take(float("inf")))
            await self._exporter.close()

    def _take(self, until_s: float) -> list[_Ended]:
        taken: list[_Ended] = []
        while self._waiting and len(taken) < MOST_AT_ONCE and self._waiting[0].due_s <= until_s:
            taken.append(self._waiting.popleft())
        return taken

    async def _export(self, ended: Sequence[_Ended]) -> None:
        spans: list[SpanData] = []
        for one in ended:
            spans.append(one.root)
            for journey in one.journeys:
                if journey.story is not None:
                    spans += spans_of_story(journey.story, one.context, one.root.id, self._frontend)
        taken = await self._exporter.export(spans)
        self._outcomes["exported" if taken else "failed"].inc(len(ended))
        now_s = asyncio.get_running_loop().time()
        if not taken and now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            log.warning("traces.not_exported", traces=len(ended), spans=len(spans))


_FIELDS = {
    "model": names.REQUEST_MODEL,
    "tenant": names.TENANT,
    "class": names.REQUEST_CLASS,
    "prompt_tokens": names.INPUT_TOKENS,
    "cached_tokens": names.CACHED_TOKENS,
    "completion_tokens": names.OUTPUT_TOKENS,
    "ttft_s": names.FIRST_CHUNK_S,
    "attempts": names.ATTEMPTS,
}


def _went_wrong(status: int, code: str | None) -> bool:
    """Return True for an error of the server, also one that ended a stream; a refusal for a client's own mistake is none."""
    return status >= 500 or (code is not None and code != CLIENT_GONE and (status < 400 or status == TOO_MANY_REQUESTS))


def _remarkable(story: Story) -> bool:
    return story.level not in (None, "met") or any(journey.attempts > 1 for journey in story.journeys)
