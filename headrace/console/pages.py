"""Serves the console's page and its files, which are part of the package: nothing is built, nothing comes from other hosts."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from headrace.frontend.errors import RouteNotFound

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
        """Return the Starlette routes."""
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
        """Return the page, which holds no data."""
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
