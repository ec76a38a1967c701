"""Answers the routes of Ollama's API that describe models and the server, without a worker."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from importlib import metadata

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.frontend.auth.caller import check_model, covered
from headrace.frontend.errors import BadRequest
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.ollama.api import known_name
from headrace.frontend.ollama.schema import (
    OllamaDetails,
    OllamaModel,
    OllamaModels,
    OllamaShown,
    OllamaShowRequest,
    OllamaVersion,
)
from headrace.frontend.ports import Models, Served

SPOKEN = "0.12.11"  # the version of Ollama whose API this is; clients compare it with the least that they need
FOREVER = "9999-12-31T23:59:59Z"
TEMPLATE = "chat_template.jinja"

_show = msgspec.json.Decoder(OllamaShowRequest)


class OllamaModelRoutes:
    """The endpoints of `/api/tags`, `/api/ps`, `/api/version` and `/api/show`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        """Return the Starlette routes; `show` is served as a route with a body."""
        return [Route("/api/tags", self.tags), Route("/api/ps", self.ps), Route("/api/version", self.version)]

    async def tags(self, request: Request) -> Response:
        """List the models and adapters that have a ready worker."""
        return _json(OllamaModels(models=[_entry(served) for served in covered(request.scope, self._ready())]))

    async def ps(self, request: Request) -> Response:
        """List them as loaded, which they stay."""
        entries = []
        for served in covered(request.scope, self._ready()):
            entry = _entry(served)
            entry.expires_at, entry.size_vram, entry.context_length = FOREVER, 0, served.card.context_length
            entries.append(entry)
        return _json(OllamaModels(models=entries))

    async def version(self, request: Request) -> Response:
        return _json(OllamaVersion(version=SPOKEN, headrace=metadata.version("headrace")))

    async def show(self, body: bytes, exchange: HttpExchange) -> bytes:
        """Describe a model. Raises BadRequest, UnknownModel."""
        request = await decode_request(_show, body)
        name = request.model or request.name
        if not name:
            raise BadRequest("missing required parameter: model", param="model", code="missing_required_parameter")
        served = self._models.get(known_name(name, self._models))
        check_model(exchange.scope, served.adapter or served.card.model)
        card = served.card
        shown = OllamaShown(
            modified_at=_time(served),
            template=served.files.get(TEMPLATE, b"").decode("utf-8", "replace"),
            details=OllamaDetails(parent_model=card.model if served.adapter else ""),
            model_info={
                "general.architecture": "headrace",
                "general.basename": served.adapter or card.model,
                "headrace.context_length": card.context_length,
                "headrace.vocab_size": card.vocab_size,
            },
            capabilities=_capabilities(served),
        )
        return msgspec.json.encode(shown)

    def _ready(self) -> list[Served]:
        models = self._models
        return [models.get(name) for name in models.listed_names()]


def _entry(served: Served) -> OllamaModel:
    card = served.card
    name = served.name
    return OllamaModel(
        name=name,
        model=name,
        modified_at=_time(served),
        digest=hashlib.sha256(name.encode() + b"\n" + msgspec.json.encode(card)).hexdigest(),
        details=OllamaDetails(parent_model=card.model if served.adapter else ""),
    )


def _time(served: Served) -> str:
    return datetime.fromtimestamp(int(served.card.created), UTC).isoformat().replace("+00:00", "Z")


def _capabilities(served: Served) -> list[str]:
    card = served.card
    there = {
        "completion": bool({"chat", "completion"} & set(card.kinds)),
        "tools": card.tool_parser is not None,
        "thinking": card.reasoning_parser is not None,
        "vision": "image" in card.media,
        "embedding": "embedding" in card.kinds,
    }
    return [name for name, has in there.items() if has]


def _json(value: OllamaModels | OllamaVersion) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
