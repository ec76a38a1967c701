"""An ASGI endpoint for routes that answer without a job, such as counting tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from starlette.types import Receive, Scope, Send

from headrace.frontend.errors import ErrorForm, FrontendError, translate
from headrace.frontend.http.http_exchange import ClientGone, HttpExchange, log_ids
from headrace.frontend.http.malloc import forget_frames
from headrace.frontend.settings import FrontendSettings

log = structlog.get_logger()

Handler = Callable[[bytes, HttpExchange], Awaitable[bytes]]
"""Takes the body of a request and returns the JSON of the answer."""


class UnaryEndpoint:
    """An ASGI application for one route, with the same limits on bodies as all routes."""

    def __init__(self, handler: Handler, settings: FrontendSettings, *, form: ErrorForm = FrontendError.body) -> None:
        self._handler = handler
        self._settings = settings
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send)
        try:
            body = await exchange.read_body(self._settings)
            await exchange.send_json(await self._handler(body, exchange))
        except ClientGone as gone:
            scope["headrace.outcome"] = "client_gone"
            forget_frames(gone)
        except Exception as error:
            seen = translate(error)
            scope["headrace.outcome"] = seen.code
            if type(seen) is FrontendError:
                log.error("request.crashed", **log_ids(scope), exc_info=error)
            if exchange.started:
                raise
            await exchange.send_error(seen, form=self._form)
            forget_frames(error)
