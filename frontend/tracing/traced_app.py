"""Wraps the application of a generating route so that its requests are traced."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.frontend.tracing.tracer import Tracer


class TracedApp:
    """Traces every request of one route. What runs inside finds the trace in the scope, and leaves there how it ended."""

    def __init__(self, app: ASGIApp, tracer: Tracer, route: str) -> None:
        self._app = app
        self._tracer = tracer
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = scope["headrace.trace"] = self._tracer.begin(scope["headers"])
        try:
            await self._app(scope, receive, send)
        finally:
            self._tracer.end(
                trace,
                scope,
                route=self._route,
                status=scope.get("headrace.status", 0),
                code=scope.get("headrace.outcome"),
            )
