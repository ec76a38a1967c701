"""Changes dead letters and workers for an operator who has the admin key. Each act is told to the audit logs."""

from __future__ import annotations

import os
import signal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.base.errors import CommandError
from headrace.broker.membership.local_processes import machine_id
from headrace.broker.messages import Drain, WorkerMember
from headrace.commands.dlq import find_letter
from headrace.commands.dlq_retry import run_again
from headrace.commands.operating.audit import announce
from headrace.commands.operating.control import find_worker, live_workers, tell_worker
from headrace.console.guard import ConsoleGuard
from headrace.frontend.errors import BadRequest, Forbidden, FrontendError
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
        """Return the Starlette routes."""
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
