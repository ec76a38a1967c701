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

_PARTS = (
    chats,
    responses,
    messages,
    pooling,
    images,
    videos,
    transcriptions,
    tokens,
    ollama,
    server,
)  # in the order of the document


@cache
def build_openapi() -> bytes:
    """Return the OpenAPI 3.1 document as JSON."""
    types = [one for part in _PARTS for one in part.TYPES]
    types += [*FILE_SCHEMAS, *BATCH_SCHEMAS]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for part in _PARTS:
        paths |= part.paths()
    paths |= file_paths(stored_errors())
    paths |= batch_paths(stored_errors())
    info = {"title": "Headrace", "version": metadata.version("headrace"), "description": "LLM serving over NATS JetStream"}
    document = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
    return msgspec.json.encode(document)
