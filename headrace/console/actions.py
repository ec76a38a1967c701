"""The console's routes that change dead letters and workers, and those about single requests and streams."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.base.errors import CommandError
from headrace.broker.membership.members import machine_id
from headrace.broker.messages.control import Drain, Explain, Explanation, Routed, Stories, TellStories
from headrace.broker.messages.members import WorkerMember
from headrace.commands.control import announce, ask_all, ask_subjects, find_worker, live_workers, request_id, tell_worker
from headrace.commands.dlq import find_letter, run_again
from headrace.commands.trace import chronology, live_ingresses, live_routers, recorded_placements, story_data
from headrace.console.guard import KEY_HEADER, ConsoleGuard
from headrace.console.readers import Readers
from headrace.frontend.errors import BadRequest, Forbidden, FrontendError, RequestUnknown
from headrace.jetstream.health import exposition
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

_ANSWER_S = 5.0


class NotDone(FrontendError, status=409, code="not_done"):
    """The deployment refused the act, or there is nothing to act on."""


class Actions:
    """The endpoints that change something, all by POST with the admin key."""

    def __init__(self, messaging: Messaging, names: Subjects, guard: ConsoleGuard, *, may_kill: bool) -> None:
        """`may_kill`: workers of this machine may be killed, to see what becomes of their streams."""
        self._messaging = messaging
        self._names = names
        self._guard = guard
        self._may_kill = may_kill

    def routes(self) -> list[Route]:
        return [
            Route("/console/api/letters/{seq:int}/drop", self.drop, methods=["POST"]),
            Route("/console/api/letters/{seq:int}/retry", self.retry, methods=["POST"]),
            Route("/console/api/workers/{worker}/drain", self.drain, methods=["POST"]),
            Route("/console/api/workers/{worker}/kill", self.kill, methods=["POST"]),
        ]

    async def drop(self, request: Request) -> Response:
        """Forget a dead letter. Raises NotDone if it is gone."""
        await self._guard.check_admin(request.headers)
        seq = request.path_params["seq"]
        if not await self._messaging.delete_message(self._names.stream("DLQ"), seq):
            raise NotDone(f"there is no dead letter {seq} any more")
        announce(self._messaging, self._names, "console dlq drop", letters=[seq])
        return _done(f"dead letter {seq} dropped")

    async def retry(self, request: Request) -> Response:
        """Run the request of a dead letter once more, and drop the letter if it is answered. Raises NotDone."""
        await self._guard.check_admin(request.headers)
        seq = request.path_params["seq"]
        try:
            letter = await find_letter(self._messaging, self._names, str(seq))
            if letter.request is None:
                raise NotDone(f"{seq} is {letter.reason}, no request: there is nothing to run")
            ran = await run_again(self._messaging, self._names, letter.request.envelope)
        except CommandError as error:
            raise NotDone(str(error)) from error
        dropped = await self._messaging.delete_message(self._names.stream("DLQ"), seq)
        announce(self._messaging, self._names, "console dlq retry", letter=seq, retried_as=ran, dropped=dropped)
        return _done(f"answered as {ran}; dead letter {seq} dropped")

    async def drain(self, request: Request) -> Response:
        """Have a worker finish or hand over its runs and leave. Raises NotDone."""
        await self._guard.check_admin(request.headers)
        try:
            worker, _ = await tell_worker(
                self._messaging, self._names, request.path_params["worker"], Drain(), timeout_s=_ANSWER_S
            )
        except CommandError as error:
            raise NotDone(str(error)) from error
        announce(self._messaging, self._names, "console worker drain", worker=worker)
        return _done(f"worker {worker} drains")

    async def kill(self, request: Request) -> Response:
        """Kill a worker of this machine (SIGKILL). Raises Forbidden where this is not meant for it, NotDone elsewhere."""
        await self._guard.check_admin(request.headers)
        if not self._may_kill:
            raise Forbidden("this console kills no workers: it is not that of a development deployment", code="no_kills")
        member = await self._member(request)
        if not member.pid or not member.machine or member.machine != machine_id():
            raise NotDone(f"worker {member.worker} runs on {member.host or 'another machine'}, out of this console's reach")
        try:
            os.kill(member.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError) as error:
            raise NotDone(f"worker {member.worker} (pid {member.pid}) cannot be killed: {error.strerror}") from error
        announce(self._messaging, self._names, "console worker kill", worker=member.worker)
        return _done(f"worker {member.worker} (pid {member.pid}) killed")

    async def _member(self, request: Request) -> WorkerMember:
        try:
            return find_worker(request.path_params["worker"], await live_workers(self._messaging, self._names))
        except CommandError as error:
            raise BadRequest(str(error), param="worker", code="unknown_worker") from error


def _done(message: str) -> Response:
    return Response(msgspec.json.encode({"message": message}), media_type="application/json")


PAGE = 50
MOST_ID = 160
_UNSHOWN = frozenset({"hashes", "prefill", "v"})


class RequestRoutes:
    def __init__(self, messaging: Messaging, names: Subjects, readers: Readers, guard: ConsoleGuard) -> None:
        self._messaging = messaging
        self._names = names
        self._readers = readers
        self._guard = guard

    def routes(self) -> list[Route]:
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
    """Return a placement without the fields that only a replay uses."""
    return {name: value for name, value in msgspec.structs.asdict(one).items() if name not in _UNSHOWN}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers={"cache-control": "no-store"})


_BEARER = "bearer "


class StreamMetrics:
    """The endpoint. Each scrape reads the streams anew."""

    def __init__(self, readers: Readers, guard: ConsoleGuard) -> None:
        self._readers = readers
        self._guard = guard

    def routes(self) -> list[Route]:
        return [Route("/metrics", self.scrape)]

    async def scrape(self, request: Request) -> Response:
        """Return the metrics. Prometheus gives the key, where one is needed, as a bearer token."""
        given = request.headers.get("authorization", "")
        key = given[len(_BEARER) :] if given.lower().startswith(_BEARER) else ""
        await self._guard.check_reader({KEY_HEADER: key} if key else request.headers)
        return Response(exposition(await self._readers.stream_states()), headers={"content-type": CONTENT_TYPE_LATEST})
