"""Describes the HTTP APIs as OpenAPI: the document, from what each API brings, and the operations and answers to describe one.

Types are the structs that check requests, so the document cannot be out of date.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

import msgspec

from headrace.frontend.apis import load_apis


@cache
def build_openapi() -> bytes:
    """Return the OpenAPI 3.1 document as JSON. Raises SettingsError for an API that cannot be loaded."""
    apis = load_apis()
    types = [one for api in apis for one in api.types]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for api in apis:
        paths |= api.paths()
    info = {"title": "Headrace", "version": metadata.version("headrace"), "description": "LLM serving over NATS JetStream"}
    document = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
    return msgspec.json.encode(document)


ERRORS = {
    "400": "a parameter is missing, wrong or not supported; `param` names it",
    "404": "no such model or route",
    "405": "wrong method",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "414": "the URL is too long",
    "431": "the headers are too many or too large",
    "499": "the request was cancelled by a call",
    "429": "a queue is full; see Retry-After and `code`",
    "500": "internal error",
    "502": "the engine failed",
    "503": "no worker is ready, or the broker cannot be reached",
    "504": "the deadline passed",
}


PAGE = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]


def stored_errors() -> dict[str, Any]:
    return {status: answer for status, answer in all_errors().items() if status in ("400", "404", "408", "413", "503")}


def all_errors() -> dict[str, Any]:
    return {status: json_answer(text, "ErrorAnswer") for status, text in ERRORS.items()}


def json_body(schema: str) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}


def in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def changing(summary: str, request: str, answer: str) -> dict[str, Any]:
    return generation(summary, request, answer, streams=False)


def generation(summary: str, request: str, answer: str, *, error: str = "ErrorAnswer", streams: bool = True) -> dict[str, Any]:
    """Return a POST with a body, all of whose errors have the shape `error`. With `streams` it may be answered by events."""
    whole = streamed(answer) if streams else json_answer("the answer", answer)
    statuses = {**ERRORS, "529": ERRORS["503"]} if error == "AnthropicError" else ERRORS
    responses = {"200": whole} | {status: json_answer(text, error) for status, text in statuses.items()}
    return {"summary": summary, "requestBody": json_body(request), "responses": responses}


def operation(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    """Return an operation without a body."""
    return {"summary": summary, "responses": responses}


def json_answer(description: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


def either(description: str, *schemas: str) -> dict[str, Any]:
    options = [{"$ref": f"#/components/schemas/{schema}"} for schema in schemas]
    return {"description": description, "content": {"application/json": {"schema": {"anyOf": options}}}}


def streamed(schema: str) -> dict[str, Any]:
    answer = json_answer("the answer; with `stream` server-sent events", schema)
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
    answer["content"]["text/event-stream"] = {"schema": event}  # of each event
    return answer


def some_object(description: str) -> dict[str, Any]:
    """Return the answers of an operation that gives an object of no fixed type."""
    return {"200": {"description": description, "content": {"application/json": {"schema": {"type": "object"}}}}}


def states(good: str, bad: str) -> dict[str, Any]:
    """Return the answers 200 and 503 of an operation that tells a state."""
    body = {"application/json": {"schema": {"type": "object"}}}
    return {"200": {"description": good, "content": body}, "503": {"description": bad, "content": body}}
