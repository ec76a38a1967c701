"""`/openapi.json`, made from the same structs that check the requests, so that it cannot be out of date."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

import msgspec

from frontend.schema.answers import ChatAnswer, CompletionAnswer, ErrorAnswer, ModelEntry, ModelList
from frontend.schema.chat import ChatRequest
from frontend.schema.completions import CompletionRequest

_ERRORS = {
    "400": "a parameter is missing, wrong or not supported; `param` names it",
    "404": "no such model or route",
    "405": "wrong method",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "429": "a queue is full; see Retry-After and `code`",
    "500": "internal error",
    "502": "the engine failed",
    "503": "no worker is ready, or the broker cannot be reached",
    "504": "the deadline passed",
}


@cache
def build_openapi() -> bytes:
    """The OpenAPI 3.1 document as JSON."""
    types = (ChatRequest, CompletionRequest, ChatAnswer, CompletionAnswer, ModelEntry, ModelList, ErrorAnswer)
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {
        "/v1/chat/completions": {"post": _generation("Answer a conversation", "ChatRequest", "ChatAnswer")},
        "/v1/completions": {"post": _generation("Continue one or more prompts", "CompletionRequest", "CompletionAnswer")},
        "/v1/models": {"get": _get("List the served models", {"200": _json("the models", "ModelList")})},
        "/v1/models/{model}": {
            "get": _get("One model", {"200": _json("the model", "ModelEntry"), "404": _json("no such model", "ErrorAnswer")})
            | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]}
        },
        "/health": {"get": _get("What is up", _states("healthy", "unhealthy"))},
        "/ready": {"get": _get("Whether some model can answer now", _states("ready", "not ready"))},
        "/live": {"get": _get("Whether the process runs", {"200": {"description": "it does"}})},
        "/metrics": {"get": _get("Prometheus metrics", {"200": {"description": "text format", "content": {"text/plain": {}}}})},
        "/openapi.json": {"get": _get("This document", {"200": {"description": "OpenAPI 3.1"}})},
    }
    info = {"title": "Headrace", "version": metadata.version("headrace"), "description": "OpenAI-compatible LLM serving"}
    document = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
    return msgspec.json.encode(document)


def _json(description: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


def _get(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "responses": responses}


def _states(good: str, bad: str) -> dict[str, Any]:
    body = {"application/json": {"schema": {"type": "object"}}}
    return {"200": {"description": good, "content": body}, "503": {"description": bad, "content": body}}


def _generation(summary: str, request: str, answer: str) -> dict[str, Any]:
    whole = _json("the answer; with `stream` server-sent events that end with [DONE]", answer)
    whole["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{request}"}}}}
    responses = {"200": whole} | {status: _json(text, "ErrorAnswer") for status, text in _ERRORS.items()}
    return {"summary": summary, "requestBody": body, "responses": responses}
