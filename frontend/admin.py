"""Routes for operators: cancelling requests of any frontend, loading and unloading adapters, and routes that are not served."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.broker.errors import AdapterRefused
from headrace.broker.models.card_store import AdapterClient
from headrace.frontend.auth.key_ring import who
from headrace.frontend.errors import BadRequest, RequestUnknown, RouteNotFound
from headrace.frontend.generation.plan import tenant_in
from headrace.frontend.http.bodies import ReportingDecoder, decode_body, model_name, unsupported
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.ports import JobPort, Models, Served

ANSWER_ID = re.compile(r"[a-z-]+[-_](?P<job>[0-9a-f]{26})")  # ids of answers contain the id of their job
ASK_S = 2.0  # for the other frontends to answer
MOST_ID = 160  # characters


class CancelledRequest(msgspec.Struct):
    """The answer to a cancellation."""

    id: str
    object: Literal["request.cancelled"] = "request.cancelled"
    cancelled: bool = True


class CancelRoute:
    def __init__(self, port: JobPort) -> None:
        self._port = port

    def routes(self) -> list[Route]:
        return [Route("/v1/requests/{id}", self.delete, methods=["DELETE"])]

    async def delete(self, request: Request) -> Response:
        """Cancel a request by its id. Raises RequestUnknown, BrokerUnavailable."""
        name: str = request.path_params["id"]
        tenant = tenant_in(request)
        answer = ANSWER_ID.fullmatch(name)
        for each in (answer["job"], name) if answer else (name,):
            if len(name) <= MOST_ID and await self._port.cancel(each, tenant, timeout_s=ASK_S):
                return Response(msgspec.json.encode(CancelledRequest(id=name)), media_type="application/json")
        raise RequestUnknown(f"no request {name[:MOST_ID]!r} is running; it may have ended")


# Loads and unloads LoRA adapters: `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter` of vLLM's server.
#
# The routes are off unless a setting turns them on. Their clients name folders on the workers' machines, so they belong to
# deployments whose clients are trusted. `model` is an addition, as an ingress may have several models. The change is made on
# all workers of the model.

log = structlog.get_logger()

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to load an adapter: vLLM's fields, and the model."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    model: str | None = None


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to unload an adapter. `lora_int_id` is vLLM's own number and has no effect here."""

    lora_name: str
    lora_int_id: int | None = None
    model: str | None = None


_load = ReportingDecoder(LoadRequest)
_unload = ReportingDecoder(UnloadRequest)


class AdapterApi:
    """Loads and unloads adapters. It answers with a JSON string in vLLM's wording."""

    def __init__(self, loader: AdapterClient, models: Models) -> None:
        self._loader = loader
        self._models = models

    async def load(self, body: bytes, exchange: HttpExchange) -> bytes:
        """Load an adapter. Raises BadRequest, UnknownModel, NoWorker."""
        request = decode_body(_load, body)
        for param, value in (("lora_name", request.lora_name), ("lora_path", request.lora_path)):
            if not value:
                raise BadRequest(f"{param} must not be empty", param=param)
        if request.load_inplace:
            raise unsupported("load_inplace", "is not possible while requests run on the adapter; unload it first")
        if request.is_3d_lora_weight:
            raise unsupported("is_3d_lora_weight", "is not supported")
        served = self._model(request.model)
        if request.lora_name in (served.card.model, *served.card.aliases, *self._models.names()):
            raise BadRequest(f"{request.lora_name!r} is the name of a model", param="lora_name")
        try:
            await self._loader.load(served.card.pool, request.lora_name, request.lora_path)
        except AdapterRefused as error:
            raise BadRequest(str(error), param="lora_path", code="adapter_refused") from None
        log.warning("audit.adapter_loaded", adapter=request.lora_name, model=served.card.model, **who(exchange.scope))
        return msgspec.json.encode(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    async def unload(self, body: bytes, exchange: HttpExchange) -> bytes:
        """Unload an adapter, or forget one that no worker has. Raises BadRequest, UnknownModel."""
        request = decode_body(_unload, body)
        if not request.lora_name:
            raise BadRequest("lora_name must not be empty", param="lora_name")
        served = self._models.get(request.lora_name)
        if served.adapter is None:
            raise BadRequest(f"{request.lora_name!r} is a model and no adapter", param="lora_name")
        if request.model is not None and self._model(request.model).card.pool != served.card.pool:
            raise BadRequest(f"{request.lora_name!r} is an adapter of {served.card.model!r}", param="model")
        try:
            await self._loader.unload(served.card.pool, request.lora_name)
        except AdapterRefused as error:
            raise BadRequest(str(error), param="lora_name", code="adapter_refused") from None
        log.warning("audit.adapter_unloaded", adapter=request.lora_name, model=served.card.model, **who(exchange.scope))
        return msgspec.json.encode(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    def _model(self, name: str | None) -> Served:
        name = model_name(name, self._models)
        found = self._models.get(name)
        if found.adapter is not None:
            raise BadRequest(f"{name!r} is an adapter itself", param="model")
        return found


NOT_SERVED = {
    "/api/blobs": "the files of models",
    "/api/copy": "copying models",
    "/api/create": "making models",
    "/api/delete": "deleting models",
    "/api/pull": "pulling models",
    "/api/push": "pushing models",
    "/v1/assistants": "assistants",
    "/v1/audio": "speech and voices",
    "/v1/chatkit": "chat kits",
    "/v1/complete": "Anthropic's text completions",
    "/v1/containers": "containers",
    "/v1/edits": "edits",
    "/v1/engines": "engines",
    "/v1/evals": "evaluations",
    "/v1/fine-tunes": "fine-tuning jobs",
    "/v1/fine_tuning": "fine-tuning jobs",
    "/v1/images": "edits and variations of images",
    "/v1/messages/batches": "batches",
    "/v1/moderations": "moderations",
    "/v1/organization": "organizations",
    "/v1/projects": "projects",
    "/v1/realtime": "realtime sessions",
    "/v1/threads": "threads of assistants",
    "/v1/vector_stores": "vector stores",
    "/v1/videos": "remixes of videos",
}


class NotServed(RouteNotFound, code="not_served"):
    """The API has such a route, but this server does not serve it."""


def missed(path: str, served: Iterable[str]) -> RouteNotFound:
    """Return the 404 of a path, for any method. `served` has the paths of this server."""
    there = ", ".join(sorted(served))
    for prefix, what in NOT_SERVED.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return NotServed(f"{path}: {what} are not served here; served here: {there}")
    return RouteNotFound(f"no route {path}; served here: {there}")
