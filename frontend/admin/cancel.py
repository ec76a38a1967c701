"""`DELETE /v1/requests/{id}`: end a running request, whichever frontend it came through."""

from __future__ import annotations

import re
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.frontend.errors import RequestUnknown
from headrace.frontend.generation.job_options import TENANT_HEADER
from headrace.frontend.ports import JobPort
from headrace.jetstream.subjects import tenant_token

ANSWER_ID = re.compile(r"[a-z-]+[-_](?P<job>[0-9a-f]{26})")  # what answers are called after their job
ASK_S = 2.0  # the other frontends
MOST_ID = 160  # characters


class CancelledRequest(msgspec.Struct):
    """The answer."""

    id: str
    object: Literal["request.cancelled"] = "request.cancelled"
    cancelled: bool = True


class CancelRoute:
    """The endpoint."""

    def __init__(self, port: JobPort) -> None:
        self._port = port

    def routes(self) -> list[Route]:
        """Of Starlette."""
        return [Route("/v1/requests/{id}", self.delete, methods=["DELETE"])]

    async def delete(self, request: Request) -> Response:
        """Raises RequestUnknown, BrokerUnavailable."""
        name: str = request.path_params["id"]
        tenant = tenant_token(request.headers.get(TENANT_HEADER.decode(), ""))
        answer = ANSWER_ID.fullmatch(name)
        for each in (answer["job"], name) if answer else (name,):
            if len(name) <= MOST_ID and await self._port.cancel(each, tenant, timeout_s=ASK_S):
                return Response(msgspec.json.encode(CancelledRequest(id=name)), media_type="application/json")
        raise RequestUnknown(f"no request {name[:MOST_ID]!r} is running; it may have ended")
