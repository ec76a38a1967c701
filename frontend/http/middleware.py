"""ASGI middleware that gives every request its id, its log line and its metrics.

It calls the generation routes directly, past Starlette's middleware and router: these cost some 15 µs per request and, worse,
three more coroutines per write.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.broker.jobs import new_id
from headrace.frontend.auth.audit import REFUSALS, AuditLog
from headrace.frontend.auth.caller import Caller
from headrace.frontend.auth.gate import REQUEST_ID, Gate
from headrace.frontend.errors import ErrorForm, FrontendError, translate
from headrace.frontend.http.access_log import AccessLog
from headrace.frontend.http.http_exchange import HttpExchange, SlowReader, log_ids, shown_id
from headrace.frontend.metrics import Metrics
from headrace.frontend.tenant_metrics import QUOTA

log = structlog.get_logger()

_PROBES = frozenset({"/live", "/ready", "/health", "/metrics", "/ping", "/load"})  # requested every second by probes
_BELOW = tuple(
    (f"{base}/", f"{base}/{{id}}")
    for base in (
        *("/v1/models", "/v1/responses", "/v1/requests", "/v1/chat/completions", "/v1/conversations"),
        *("/v1/files", "/v1/uploads"),
    )
)
FormOf = Callable[[str, Iterable[tuple[bytes, bytes]]], ErrorForm]


class Story(Protocol):
    """The fields of a request's log line besides its route and status, and what of them is counted for its tenant."""

    first_token_s: float | None

    def used(self) -> tuple[int, int]: ...

    def fields(self) -> dict[str, object]: ...


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
        self._metrics.answered(route, status)
        self._metrics.duration.series(route).observe(took)
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
        story: Story | None = scope.get("headrace.story")
        if story is not None:
            values |= story.fields()
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
        story: Story | None = scope.get("headrace.story")
        if story is not None:
            series.used(*story.used())
            if story.first_token_s is not None:
                series.firsts.inc()
                series.first_s.inc(story.first_token_s)


def _marking(scope: Scope, send: Send) -> Send:
    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            scope["headrace.status"] = message["status"]
            message["headers"] = [*message.get("headers", ()), (REQUEST_ID, shown_id(scope).encode())]
        await send(message)

    return marked
