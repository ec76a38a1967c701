"""Builds `/openapi.json` from the structs that check the requests, so that it cannot be out of date."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

import msgspec

from headrace.frontend.api_description import (
    chats,
    images,
    messages,
    ollama,
    pooling,
    responses,
    server,
    tokens,
    transcriptions,
    videos,
)
from headrace.frontend.api_description.operations import stored_errors
from headrace.frontend.batches.describe import batch_paths
from headrace.frontend.batches.schema import SCHEMAS as BATCH_SCHEMAS
from headrace.frontend.files.describe import file_paths
from headrace.frontend.files.schema import SCHEMAS as FILE_SCHEMAS

# The types and the paths of each API, in the order of the document.
_APIS = (
    (chats.TYPES, chats.paths),
    (responses.TYPES, responses.paths),
    (messages.TYPES, messages.paths),
    (pooling.TYPES, pooling.paths),
    (images.TYPES, images.paths),
    (videos.TYPES, videos.paths),
    (transcriptions.TYPES, transcriptions.paths),
    (tokens.TYPES, tokens.paths),
    (ollama.TYPES, ollama.paths),
    (server.TYPES, server.paths),
)


@cache
def build_openapi() -> bytes:
    """Return the OpenAPI 3.1 document as JSON."""
    every: list[Any] = [one for types, _ in _APIS for one in types]
    every += [*FILE_SCHEMAS, *BATCH_SCHEMAS]
    _, components = msgspec.json.schema_components(every, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for _, of_api in _APIS:
        paths |= of_api()
    paths |= file_paths(stored_errors())
    paths |= batch_paths(stored_errors())
    info = {"title": "Headrace", "version": metadata.version("headrace"), "description": "LLM serving over NATS JetStream"}
    document = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
    return msgspec.json.encode(document)
