"""Describes the routes of running requests, of durable streams and of the server itself."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.frontend.admin.cancel import CancelledRequest
from headrace.frontend.api_description.operations import in_path, json_answer, operation, some_object, states
from headrace.frontend.pages.welcome import Welcome

TYPES: tuple[type[msgspec.Struct], ...] = (CancelledRequest, Welcome)


def paths() -> dict[str, Any]:
    """Return the paths that do not belong to an API of a model."""
    return {**_requests(), **_server()}


def _requests() -> dict[str, Any]:
    """Return the paths of running requests and durable streams."""
    return {
        "/v1/requests/{id}": {
            "parameters": [in_path("id")],
            "delete": operation(
                "End a running request",
                {
                    "200": json_answer("it was running and is ended", "CancelledRequest"),
                    "404": json_answer("no such request is running", "ErrorAnswer"),
                    "503": json_answer("not every frontend could be asked", "ErrorAnswer"),
                },
            ),
        },
        "/v1/streams/{job}": {
            "parameters": [in_path("job")],
            "get": operation(
                "Follow a durable stream",
                {
                    "200": {"description": "its events", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
                    "400": json_answer("Last-Event-ID is of no event of it", "ErrorAnswer"),
                    "404": json_answer("there is no such job", "ErrorAnswer"),
                    "410": json_answer("its events are not stored any more", "ErrorAnswer"),
                },
            ),
        },
    }


def _server() -> dict[str, Any]:
    """Return the paths that tell of the server itself."""
    page = {"description": "a page", "content": {"text/html": {"schema": {"type": "string"}}}}
    welcome = json_answer("what this server is", "Welcome")
    welcome["content"] |= page["content"]
    plain = {"200": {"description": "healthy"}, "503": {"description": "unhealthy"}}
    return {
        "/": {"get": operation("What this server is", {"200": welcome})},
        "/docs": {"get": operation("This document as a page", {"200": page})},
        "/health": {"get": operation("What is up", states("healthy", "unhealthy"))},
        "/ready": {
            "parameters": [{"name": "of", "in": "query", "schema": {"type": "string", "enum": ["frontend"]}}],
            "get": operation("Whether some model can answer now, or requests are taken", states("ready", "not ready")),
        },
        "/live": {"get": operation("Whether the process runs", {"200": {"description": "it does"}})},
        "/ping": {"get": operation("Health as a status alone", plain), "post": operation("Health as a status alone", plain)},
        "/load": {
            "get": operation("How many requests use an engine or wait for one", some_object("the count, as `server_load`"))
        },
        "/version": {"get": operation("The version of this server", some_object("the version"))},
        "/metrics": {
            "get": operation("Prometheus metrics", {"200": {"description": "text format", "content": {"text/plain": {}}}})
        },
        "/openapi.json": {"get": operation("This document", {"200": {"description": "OpenAPI 3.1"}})},
    }
