"""Loads and unloads LoRA adapters: `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter` of vLLM's server.

The routes are off unless a setting turns them on. Their clients name folders on the workers' machines, so they belong to
deployments whose clients are trusted. `model` is an addition, as an ingress may have several models. The change is made on all
workers of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import structlog
from starlette.types import ASGIApp

from headrace.broker.errors import AdapterRefused
from headrace.frontend.auth.audit import who
from headrace.frontend.errors import BadRequest
from headrace.frontend.http.body_decoding import decode_body
from headrace.frontend.http.field_checks import model_name, unsupported
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.http.unary_endpoint import UnaryEndpoint
from headrace.frontend.ports import Models, Served
from headrace.frontend.settings import FrontendSettings

log = structlog.get_logger()

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


class AdapterLoader(Protocol):
    """`headrace.broker.models.adapter_client.AdapterClient` as these routes see it."""

    async def load(self, pool: str, name: str, source: str, /) -> Sequence[Any]:
        """Load an adapter on all workers of a pool. Raises NoWorker, AdapterRefused."""

    async def unload(self, pool: str, name: str, /) -> Sequence[Any]:
        """Unload an adapter; the result is empty if no worker had it. Raises AdapterRefused."""


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


_load = msgspec.json.Decoder(LoadRequest)
_unload = msgspec.json.Decoder(UnloadRequest)


def adapter_routes(loader: AdapterLoader, models: Models, settings: FrontendSettings) -> dict[str, ASGIApp]:
    """Return the applications by path."""
    api = AdapterApi(loader, models)
    return {LOAD: UnaryEndpoint(api.load, settings), UNLOAD: UnaryEndpoint(api.unload, settings)}


class AdapterApi:
    """Loads and unloads adapters. It answers with a JSON string in vLLM's wording."""

    def __init__(self, loader: AdapterLoader, models: Models) -> None:
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
