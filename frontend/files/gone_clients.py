"""Ends requests whose client has left in the middle of the body without an error in the log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from headrace.frontend.http.http_exchange import ClientGone
from headrace.frontend.http.malloc import forget_frames
from headrace.frontend.metrics import Metrics

Handler = Callable[[Request], Awaitable[Response]]

CLIENT_CLOSED = 499


def tolerant(handler: Handler, metrics: Metrics) -> Handler:
    """Return a handler that counts a client that leaves. The answer reaches no client; it is there for the access log."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGone as gone:
            request.scope["headrace.outcome"] = "client_gone"
            metrics.disconnects.inc()
            forget_frames(gone)
            return Response(status_code=CLIENT_CLOSED)

    return handle
