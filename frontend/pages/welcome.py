"""Answers `/`: what this server is, what it serves and where to read on, as JSON or, for browsers, as a page."""

from __future__ import annotations

from html import escape
from importlib import metadata

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.frontend.pages.reference import reference_page
from headrace.frontend.pages.style import html_page, html_response
from headrace.frontend.ports import JobPort

DESCRIPTION = "serves language models over NATS JetStream, behind the APIs of OpenAI, Anthropic and Ollama"
LINKS = {
    "docs": "/docs",
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "health": "/health",
    "metrics": "/metrics",
}


class Welcome(msgspec.Struct, kw_only=True):
    """The answer of `/`: name and version of the server, the models that can answer now, and links."""

    name: str = "Headrace"
    version: str
    description: str = f"Headrace {DESCRIPTION}."
    models: list[str]
    links: dict[str, str]
    example: str


class Pages:
    """The endpoints of `/` and `/docs`."""

    def __init__(self, port: JobPort, document: bytes) -> None:
        """`document` is the OpenAPI document as JSON."""
        self._port = port
        self._document = document
        self._reference: bytes | None = None

    def routes(self) -> list[Route]:
        """Return the Starlette routes."""
        return [Route("/", self.welcome), Route("/docs", self.docs)]

    async def docs(self, request: Request) -> Response:
        """Return the description of all routes as a page."""
        if self._reference is None:
            self._reference = reference_page(msgspec.json.decode(self._document))
        return html_response(self._reference)

    async def welcome(self, request: Request) -> Response:
        """Return JSON, or a page for clients whose `Accept` names HTML."""
        models = self._port.models.ready_names()
        example = _example(str(request.base_url).rstrip("/"), models[0] if models else "MODEL")
        answer = Welcome(version=metadata.version("headrace"), models=models, links=LINKS, example=example)
        if "text/html" in request.headers.get("accept", ""):
            return html_response(_page(answer))
        return Response(msgspec.json.encode(answer), media_type="application/json")


def _example(base: str, model: str) -> str:
    body = msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 64})
    return f"curl {base}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{body.decode()}'"


def _page(answer: Welcome) -> bytes:
    models = "".join(f"<li><code>{escape(name)}</code></li>" for name in answer.models)
    served = f"<ul>{models}</ul>" if models else '<p>None: no worker is ready. <a href="/health">Health</a> tells more.</p>'
    links = " · ".join(f'<a href="{url}">{escape(name)}</a>' for name, url in answer.links.items())
    return html_page(
        answer.name,
        f'<h1>{answer.name}</h1><p class="dim">version {escape(answer.version)}</p><p>{escape(answer.description)}</p>'
        f"<p>{links}</p><h2>Models</h2>{served}<h2>Try it</h2><pre>{escape(answer.example)}</pre>",
    )
