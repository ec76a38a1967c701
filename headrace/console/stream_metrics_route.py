"""Answers `/metrics` of the console: depth, age and lag of the deployment's streams, which no other process reads."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.console.guard import KEY_HEADER, ConsoleGuard
from headrace.console.readers import Readers
from headrace.jetstream.stream_metrics import exposition

_BEARER = "bearer "


class StreamMetrics:
    """The endpoint. Each scrape reads the streams anew."""

    def __init__(self, readers: Readers, guard: ConsoleGuard) -> None:
        self._readers = readers
        self._guard = guard

    def routes(self) -> list[Route]:
        """Return the Starlette routes."""
        return [Route("/metrics", self.scrape)]

    async def scrape(self, request: Request) -> Response:
        """Return the metrics. Prometheus gives the key, where one is needed, as a bearer token."""
        given = request.headers.get("authorization", "")
        key = given[len(_BEARER) :] if given.lower().startswith(_BEARER) else ""
        await self._guard.check_reader({KEY_HEADER: key} if key else request.headers)
        return Response(exposition(await self._readers.stream_states()), headers={"content-type": CONTENT_TYPE_LATEST})
