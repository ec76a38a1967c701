"""The route of durable streams: `GET /v1/streams/{job}` sends the events of a job, at any frontend and from any event on."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.broker.durable.errors import JobUnknown
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.tenant import tenant_in
from headrace.frontend.jobs.durable_streams import DurableStreams, EndedWithoutAnswer
from headrace.frontend.jobs.stream_names import is_token, parse_event_id

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class StreamRoutes:
    """`streams` None = nothing is stored here, so every job is unknown."""

    def __init__(self, streams: DurableStreams | None) -> None:
        self._streams = streams

    def routes(self) -> list[Route]:
        """Return the Starlette routes."""
        return [Route("/v1/streams/{job}", self.follow, methods=["GET"])]

    async def follow(self, request: Request) -> Response:
        """Send the events after the one in `Last-Event-ID`. Raises JobUnknown, StreamGone, BadRequest."""
        token, tenant = request.path_params["job"], tenant_in(request)
        if self._streams is None or not is_token(token):
            raise JobUnknown(f"there is no job {token[:80]!r}")
        first = _first(request, token)
        await self._streams.check(tenant, token)
        stream = self._streams.stream(tenant, token, first=first)
        try:
            begun = await anext(stream, b"")  # an error must be raised before the status is sent
        except EndedWithoutAnswer as ended:
            response = await self._streams.refusal(tenant, token, ended.end)
            return Response(bytes(response.body), status_code=response.status_code, media_type="application/json")
        headers = {**_HEADERS, "headrace-job": token}
        return StreamingResponse(_joined(begun, stream), media_type="text/event-stream; charset=utf-8", headers=headers)


async def _joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for events in rest:
        yield events


def _first(request: Request, token: str) -> int:
    """Return the number of the first event to send. Raises BadRequest."""
    last = request.headers.get("last-event-id")
    if last is None:
        return 0
    named, number = parse_event_id(last)
    if named != token:
        raise BadRequest(f"Last-Event-ID {last[:80]!r} is of another job than {token!r}")
    return number + 1
