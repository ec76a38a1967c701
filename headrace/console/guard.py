"""Decides who may look at the console and who may act through it: Host and Origin of every request, and the admin key.

The key travels in a header of its own, which no form and no page of another site can send without being asked first; there are
no cookies. So what changes something needs no token against cross-site requests beside it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.base.http_client import Answer, ask
from headrace.broker.keys import KeyRecord, digest_of
from headrace.frontend.auth.caller import is_loopback
from headrace.frontend.auth.gate import PageGuard
from headrace.frontend.errors import BodyTooLarge, Forbidden, FrontendError, MediaTypeRefused, RouteNotFound, Unauthorized

KEY_HEADER = "x-console-key"


class ConsoleGuard:
    """The console's rules. `stored` returns the API keys of the deployment, of which those with the scope admin count, too."""

    def __init__(self, *, host: str, key: str, private: bool, stored: Callable[[], Awaitable[list[KeyRecord]]]) -> None:
        """`private`: looking needs the key as well. So it is, whatever is asked, where other machines reach the address."""
        self._pages = PageGuard(listens_on=host, allowed_hosts=(), origins=())
        self._digest = hashlib.sha256(key.encode()).digest() if key else b""
        self._stored = stored
        self.private = private or not is_loopback(host)

    def check_page(self, method: str, headers: Mapping[str, str]) -> None:
        """Raise HostRefused or OriginRefused for what a page of another site sends."""

        def raw(name: str) -> bytes | None:
            value = headers.get(name)
            return None if value is None else value.encode("latin-1")

        self._pages.check(method, raw("host"), raw("origin"), raw("sec-fetch-site"))

    async def check_reader(self, headers: Mapping[str, str]) -> None:
        """Raise Unauthorized unless the state may be shown."""
        if self.private and not await self.is_admin(headers):
            raise Unauthorized("this console shows nothing without its key", code="console_key_needed")

    async def check_admin(self, headers: Mapping[str, str]) -> None:
        """Raise Forbidden unless the request has an admin key."""
        if not await self.is_admin(headers):
            raise Forbidden("without an admin key the console only shows", code="console_key_needed")

    async def is_admin(self, headers: Mapping[str, str]) -> bool:
        """Return whether the request has the console's own key, or an API key with the scope admin."""
        given = headers.get(KEY_HEADER, "").encode("latin-1")
        if not given:
            return False
        digest = digest_of(given)
        if self._digest and hmac.compare_digest(digest, self._digest):
            return True
        return any(_opens(record, digest, time.time()) for record in await self._stored())


def _opens(record: KeyRecord, digest: bytes, now: float) -> bool:
    if record.state(now) != "active" or "admin" not in record.scopes:
        return False
    return any(hmac.compare_digest(one.sha256, digest) and (not one.until or now < one.until) for one in record.hashes)


# Passes the playground's chats on to a frontend, whose address a page of the console could not call by itself.
#
# Only two routes are reached this way. The API key of the frontend, where it asks for one, comes from the page with each
# request and is not kept.

MOST_BODY = 32 * 1024 * 1024
ANSWER_S = 120.0  # for the head of an answer, and between two pieces of it
_PASSED_ON = ("content-type", "x-request-id", "x-headrace-decision")
JSON = "application/json"


class NoFrontend(FrontendError, status=502, code="no_frontend", retriable=True):
    """The frontend cannot be reached, or gave no answer."""


class FrontendProxy:
    def __init__(self, url: str, guard: ConsoleGuard) -> None:
        """`url` is the base URL of a frontend, empty if none is known."""
        self.url = url.rstrip("/")
        self._guard = guard

    def routes(self) -> list[Route]:
        return [
            Route("/console/api/chat", self.chat, methods=["POST"]),
            Route("/console/api/chat/models", self.models),
        ]

    async def models(self, request: Request) -> Response:
        await self._guard.check_reader(request.headers)
        return await self._forward("GET", "/v1/models", request.headers)

    async def chat(self, request: Request) -> Response:
        """Return the frontend's answer to a chat as it arrives. When the page goes, its connection is closed, which cancels."""
        await self._guard.check_reader(request.headers)
        if request.headers.get("content-type", "").partition(";")[0].strip() != JSON:
            raise MediaTypeRefused(f"a chat is {JSON}")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BODY:
                raise BodyTooLarge(f"the body has more than {MOST_BODY} bytes")
        return await self._forward("POST", "/v1/chat/completions", request.headers, bytes(body))

    async def _forward(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> Response:
        if not self.url:
            raise NoFrontend("this console knows no frontend: start it with --frontend URL")
        sent = {"X-Headrace-Explain": "1"}
        if key := headers.get("authorization", ""):
            sent["Authorization"] = key
        if body is not None:
            sent["Content-Type"] = JSON
        stack = AsyncExitStack()
        try:
            async with asyncio.timeout(ANSWER_S):
                asking = ask(method, self.url + path, headers=sent, body=body, silent_s=ANSWER_S)
                answer = await stack.enter_async_context(asking)
        except (OSError, ValueError) as error:
            why = error.__cause__ or error  # that of the system, where there was no connection
            raise NoFrontend(f"the frontend at {self.url} gave no answer: {type(why).__name__}: {why}") from None
        passed = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
        passed["cache-control"] = "no-store"
        return StreamingResponse(_pieces(stack, answer), status_code=answer.status, headers=passed)


async def _pieces(stack: AsyncExitStack, answer: Answer) -> AsyncIterator[bytes]:
    async with stack:
        async for piece in answer.pieces():
            yield piece


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


class ConsolePages:
    """The page and its files, read once. Only names that are in the package are served."""

    def __init__(self) -> None:
        self._files = {name: (body, _tag(body)) for name, body in _all(files("headrace.console") / "assets")}

    def routes(self) -> list[Route]:
        return [
            Route("/", self.home),
            Route("/console", self.index),
            Route("/console/", self.index),
            Route("/console/assets/{name:path}", self.asset),
        ]

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes."""
        return {name: len(body) for name, (body, _) in self._files.items()}

    async def home(self, request: Request) -> Response:
        return RedirectResponse("/console")

    async def index(self, request: Request) -> Response:
        return self._response("index.html", request)

    async def asset(self, request: Request) -> Response:
        """Return a file. Raises RouteNotFound."""
        name = request.path_params["name"]
        if name not in self._files:
            raise RouteNotFound(f"there is no file {name[:80]!r}")
        return self._response(name, request)

    def _response(self, name: str, request: Request) -> Response:
        body, tag = self._files[name]
        headers = {"content-security-policy": POLICY, "cache-control": "no-cache", "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=_TYPES.get(name[name.rfind(".") :], "text/plain"), headers=headers)


def _all(folder: Traversable, path: str = "") -> list[tuple[str, bytes]]:
    found = []
    for entry in folder.iterdir():
        name = f"{path}{entry.name}"
        found += _all(entry, f"{name}/") if entry.is_dir() else [(name, entry.read_bytes())]
    return found


def _tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:16]}"'
