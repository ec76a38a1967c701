"""Around every request: its id, its line in the log, its place in the metrics."""

from __future__ import annotations

import re
import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.jobs import new_id
from frontend.errors import translate
from frontend.exchange import Exchange
from frontend.metrics import Metrics

log = structlog.get_logger()

REQUEST_ID = b"x-request-id"
_GOOD_ID = re.compile(rb"[A-Za-z0-9_.:/+=-]{1,128}\Z")


class Observe:
    """Takes the client's `x-request-id` if it is a sensible one, makes one otherwise, and sends it back with every answer."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, routes: frozenset[str], access_log: bool) -> None:
        """`routes` are the paths that get their own label; others share one, so that scanners cannot fill the metrics."""
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
        request_id = given if _GOOD_ID.match(given) else new_id().encode()
        scope["headrace.request_id"] = request_id.decode()
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if not status:
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
            await send(message)

        metrics = self._metrics
        metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_marked)
        except Exception as error:
            log.error("request.crashed", request_id=scope["headrace.request_id"], exc_info=error)
            if status:
                raise  # the server closes the connection: half an answer must not look like a whole one
            await Exchange(scope, receive, send_marked).send_error(translate(error))
        finally:
            metrics.in_flight.dec()
            took = time.perf_counter() - began
            route = self._route(scope["path"])
            metrics.requests.labels(route, status or "none").inc()
            metrics.duration.series(route).observe(took)
            if self._access_log:
                self._log(scope, route, status, took)

    def _log(self, scope: Scope, route: str, status: int, took: float) -> None:
        values: dict[str, object] = {"request_id": scope["headrace.request_id"], "route": route, "status": status}
        for name in ("job", "outcome"):
            if (value := scope.get(f"headrace.{name}")) is not None:
                values[name] = value
        log.info("request.answered", **values, seconds=round(took, 4))

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"
