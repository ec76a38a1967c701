"""Cancels running requests of any frontend: `DELETE /v1/requests/{id}`."""

from __future__ import annotations

import re
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.frontend.errors import RequestUnknown
from headrace.frontend.generation.tenant import tenant_in
from headrace.frontend.ports import JobPort

ANSWER_ID = re.compile(r"[a-z-]+[-_](?P<job>[0-9a-f]{26})")  # ids of answers contain the id of their job
ASK_S = 2.0  # for the other frontends to answer
MOST_ID = 160  # characters


class CancelledRequest(msgspec.Struct):
    """The answer to a cancellation."""

    id: str
    object: Literal["request.cancelled"] = "request.cancelled"
    cancelled: bool = True


class CancelRoute:
    """The endpoint that cancels requests."""

    def __init__(self, port: JobPort) -> None:
        self._port = port

    def routes(self) -> list[Route]:
        """Return the Starlette routes."""
        return [Route("/v1/requests/{id}", self.delete, methods=["DELETE"])]

    async def delete(self, request: Request) -> Response:
        """Cancel a request by its id. Raises RequestUnknown, BrokerUnavailable."""
        name: str = request.path_params["id"]
        tenant = tenant_in(request)
        answer = ANSWER_ID.fullmatch(name)
        for each in (answer["job"], name) if answer else (name,):
            if len(name) <= MOST_ID and await self._port.cancel(each, tenant, timeout_s=ASK_S):
                return Response(msgspec.json.encode(CancelledRequest(id=name)), media_type="application/json")
        raise RequestUnknown(f"no request {name[:MOST_ID]!r} is running; it may have ended")
