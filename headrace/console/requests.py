"""Answers questions about single requests: the last ones that were placed, and the story of one with its timeline."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.broker.messages import Explain, Explanation, Routed, Stories, TellStories
from headrace.commands.explain import chronology, live_routers
from headrace.commands.operating.control_client import ask_all, ask_subjects, request_id
from headrace.commands.trace import live_ingresses, recorded_placements, story_data
from headrace.console.guard import ConsoleGuard
from headrace.console.readers import Readers
from headrace.frontend.errors import BadRequest, RequestUnknown
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

PAGE = 50
MOST_ID = 160
_UNSHOWN = frozenset({"hashes", "prefill", "v"})


class RequestRoutes:
    """The endpoints below `/console/api/requests`."""

    def __init__(self, messaging: Messaging, names: Subjects, readers: Readers, guard: ConsoleGuard) -> None:
        self._messaging = messaging
        self._names = names
        self._readers = readers
        self._guard = guard

    def routes(self) -> list[Route]:
        """Return the Starlette routes."""
        return [
            Route("/console/api/requests", self.listing),
            Route("/console/api/requests/{id}", self.story),
        ]

    async def listing(self, request: Request) -> Response:
        """Return a page of placements, the newest first; `before` is the number of the last one of the page before."""
        await self._guard.check_reader(request.headers)
        text = request.query_params.get("before")
        if text is not None and not (text.isdecimal() and len(text) < 20 and int(text)):
            raise BadRequest(f"before must be the number of a placement, got {text[:40]!r}", param="before", code="bad_cursor")
        found = await self._readers.placements(PAGE, int(text) if text else None)
        rows = [{"number": number, **placement_row(one)} for number, one in found]
        return _json({"placements": rows, "before": rows[-1]["number"] if len(rows) == PAGE else None})

    async def story(self, request: Request) -> Response:
        """Return what the frontends, the routers and the stored placements tell of a request. Raises RequestUnknown."""
        await self._guard.check_reader(request.headers)
        wanted = request_id(request.path_params["id"])
        if len(wanted) > MOST_ID:
            raise RequestUnknown(f"no request has an id of {len(wanted)} characters")
        frontends = [self._names.judge(one.ingress) for one in await live_ingresses(self._messaging, self._names)]
        routers = [one.router for one in await live_routers(self._messaging, self._names)]
        told, known = await asyncio.gather(
            ask_subjects(self._messaging, frontends, TellStories(name=wanted), Stories),
            ask_all(self._messaging, self._names, routers, Explain(id=wanted), Explanation),
        )
        stories = sorted((story for one in told if one for story in one.stories), key=lambda story: story.submitted)
        decided = chronology(one for one in known if one is not None and one.known)
        records = [] if stories else await recorded_placements(self._messaging, self._names, wanted)
        if not (stories or records or decided):
            raise RequestUnknown(
                f"no frontend remembers a request {wanted!r}, and no placement of it is on record: frontends keep their last "
                "4096 requests, records of placements two days"
            )
        data: dict[str, Any] = {**story_data(stories, decided, records), "silent": told.count(None)}
        data["decided"] = [msgspec.to_builtins(one) for one in decided]
        return _json(data)


def placement_row(one: Routed) -> dict[str, Any]:
    """Return a placement without what is only of use to a replay."""
    return {name: value for name, value in msgspec.structs.asdict(one).items() if name not in _UNSHOWN}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers={"cache-control": "no-store"})
