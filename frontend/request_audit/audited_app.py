"""Wraps the application of a generating route so that its requests go into the audit stream."""

from __future__ import annotations

import time
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.frontend.request_audit.policy import Content, Ended


class Notes(Protocol):
    """Takes what was asked. `content`: whether the words are wanted."""

    @property
    def content(self) -> bool: ...

    def note(self, ended: Ended) -> None:
        """Keep one request. Must not wait and must not raise."""


class AuditedApp:
    """Notes every request of one route when it has ended."""

    def __init__(self, app: ASGIApp, notes: Notes, route: str) -> None:
        self._app = app
        self._notes = notes
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        at, began = time.time(), time.perf_counter()
        content: Content | None = None
        if self._notes.content:
            content = scope["headrace.content"] = Content()
        try:
            await self._app(scope, receive, send)
        finally:
            caller = scope.get("headrace.caller")
            story = scope.get("headrace.story")
            self._notes.note(
                Ended(
                    at=at,
                    id=scope.get("headrace.request_id", ""),
                    route=self._route,
                    tenant=scope.get("headrace.tenant", "_"),
                    status=scope.get("headrace.status", 0),
                    took_s=time.perf_counter() - began,
                    key=caller.key if caller is not None else "",
                    client_id=scope.get("headrace.client_request_id") or "",
                    code=scope.get("headrace.outcome") or "",
                    fields=story.fields() if story is not None else {},
                    content=content,
                )
            )
