"""ASGI middleware that gives every request its id, its log line and its metrics.

It calls the generation routes directly, past Starlette's middleware and router: these cost some 15 µs per request and, worse,
three more coroutines per write.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import EventDict

from headrace.broker.jobs import new_id
from headrace.frontend.auth.caller import Caller
from headrace.frontend.auth.gate import REQUEST_ID, Gate
from headrace.frontend.auth.key_ring import REFUSALS, AuditLog
from headrace.frontend.errors import ErrorForm, FrontendError, translate
from headrace.frontend.http.exchange import HttpExchange, SlowReader, log_ids, shown_id
from headrace.frontend.metrics import QUOTA, Metrics
from headrace.frontend.request_audit import RequestSummary

# Writes the log's line of each request.
#
# structlog's methods take the fields of a line as keywords, and copy them from call to call: that was half of what a line
# cost. Here the fields go through the configured processors as the dict that they are.

log = structlog.get_logger()


class AccessLog:
    """The lines of a frontend's requests. The configuration of the log is looked at when the first one comes."""

    def __init__(self) -> None:
        self._logger: Any = None
        self._processors: Any = ()
        self._output: Any = None

    def takes(self, level: int) -> bool:
        """Return True if lines of this level are written."""
        if self._logger is None:
            configured = structlog.get_config()
            self._logger = log.bind()
            self._processors, self._output = configured["processors"], configured["logger_factory"]()
        return bool(self._logger.is_enabled_for(level))

    def write(self, level: int, event: EventDict) -> None:
        """Write a line of a level that is taken. `event` belongs to the log from now on."""
        method = "debug" if level == logging.DEBUG else "info"
        event["event"] = "request.answered"
        line: Any = event
        try:
            for processor in self._processors:
                line = processor(self._output, method, line)
        except structlog.DropEvent:
            return
        getattr(self._output, method)(line)


_PROBES = frozenset({"/live", "/ready", "/health", "/metrics", "/ping", "/load"})  # requested every second by probes
_BELOW = tuple(
    (f"{base}/", f"{base}/{{id}}")
    for base in (
        *("/v1/models", "/v1/responses", "/v1/requests", "/v1/chat/completions", "/v1/conversations"),
        *("/v1/files", "/v1/uploads"),
    )
)
FormOf = Callable[[str, Iterable[tuple[bytes, bytes]]], ErrorForm]


class Observe:
    """Gives every request an id of its own, and returns the client's `x-request-id`, if it is well-formed, or else that id."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hot: Mapping[str, ASGIApp],
        gate: Gate,
        metrics: Metrics,
        routes: frozenset[str],
        access_log: bool,
        form_of: FormOf,
    ) -> None:
        """`hot`: POST routes that answer through `HttpExchange`, which adds the id by itself. Other requests go to `app`.

        `routes` are the paths that have a label of their own. All others share one, so that scanners cannot fill the metrics.
        `form_of` gives the form of the errors of requests that do not reach their route.
        """
        self._app = app
        self._hot = hot
        self._gate = gate
        self._form_of = form_of
        self._audit = AuditLog()
        self._metrics = metrics
        self._routes = routes
        self._access_log = AccessLog() if access_log else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        scope["headrace.request_id"] = scope["headrace.fresh_id"] = new_id()
        hot = self._hot.get(scope["path"]) if scope["method"] == "POST" else None
        self._metrics.in_flight.inc()
        try:
            try:
                self._gate.admit(scope)
            except FrontendError as refused:
                await self._refuse(refused, scope, receive, send)
                return
            if hot is not None:
                await hot(scope, receive, send)
            else:
                await self._app(scope, receive, _marking(scope, send))
        except Exception as error:
            log.error("request.crashed", **log_ids(scope), exc_info=error)
            if "headrace.status" in scope:
                raise  # the server closes the connection, so that a partial answer does not look complete
            await HttpExchange(scope, receive, send).send_error(translate(error))
        finally:
            if (hold := scope.get("headrace.hold")) is not None:
                hold.leave()
            self._metrics.in_flight.dec()
            self._record(scope, time.perf_counter() - began)

    async def _refuse(self, error: FrontendError, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headrace.outcome"] = error.code
        exchange = HttpExchange(scope, receive, send)
        with contextlib.suppress(SlowReader):
            await exchange.send_error(error, form=self._form_of(scope["path"], scope["headers"]))

    def _record(self, scope: Scope, took: float) -> None:
        path = scope["path"]
        route = path if path in self._routes else next((name for start, name in _BELOW if path.startswith(start)), "other")
        status = scope.get("headrace.status", 0)
        self._metrics.answered(route, status, took)
        code = scope.get("headrace.outcome")
        if code in REFUSALS:
            self._audit.refused(scope, code, route=route)
        caller: Caller | None = scope.get("headrace.caller")
        if caller is not None:
            self._count_for_tenant(scope, caller, status)
        lines = self._access_log
        level = logging.DEBUG if route in _PROBES else logging.INFO
        if lines is None or not lines.takes(level):
            return
        values: dict[str, object] = {**log_ids(scope), "route": route, "status": status}
        if caller is not None:
            values["key"], values["tenant"] = caller.key, scope.get("headrace.tenant", caller.tenant)
        elif (bad_key := scope.get("headrace.bad_key")) is not None:
            values["key"] = bad_key
        summary: RequestSummary | None = scope.get("headrace.summary")
        if summary is not None:
            values |= summary.fields()
        if code is not None:
            values["code"] = code
        values["seconds"] = round(took, 4)
        lines.write(level, values)

    def _count_for_tenant(self, scope: Scope, caller: Caller, status: int) -> None:
        tenant = scope.get("headrace.tenant", caller.tenant)
        series = self._metrics.tenants.of(tenant, own=tenant == caller.tenant)
        series.answered(status)
        if scope.get("headrace.outcome") == QUOTA:
            series.refused.inc()
        summary: RequestSummary | None = scope.get("headrace.summary")
        if summary is not None:
            series.used(*summary.used())
            if summary.first_token_s is not None:
                series.firsts.inc()
                series.first_s.inc(summary.first_token_s)


def _marking(scope: Scope, send: Send) -> Send:
    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            scope["headrace.status"] = message["status"]
            message["headers"] = [*message.get("headers", ()), (REQUEST_ID, shown_id(scope).encode())]
        await send(message)

    return marked
