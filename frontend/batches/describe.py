"""Describes the routes over batches for the OpenAPI document."""

from __future__ import annotations

from typing import Any


def batch_paths(errors: dict[str, Any]) -> dict[str, Any]:
    """Return the paths. `errors` are the answers of routes over stored objects that are no success."""
    ended = {**errors["400"], "description": "the batch has ended"}
    full = {**errors["503"], "description": "the tenant has as many batches as it may have"}

    def operation(summary: str, answer: str, **more: Any) -> dict[str, Any]:
        good = {"description": "the answer", "content": _json(answer)}
        return {"summary": summary, "responses": {"200": good, **errors, **more.pop("also", {})}, **more}

    body = {"required": True, "content": _json("NewBatchRequest")}
    page = [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
        {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ]
    in_path = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/batches": {
            "post": operation("Answer the requests of a file", "BatchObject", requestBody=body, also={"429": full}),
            "get": operation("List batches", "BatchList", parameters=page),
        },
        "/v1/batches/{id}": {"parameters": [in_path], "get": operation("A batch", "BatchObject")},
        "/v1/batches/{id}/cancel": {
            "parameters": [in_path],
            "post": operation("Cancel a batch", "BatchObject", also={"409": ended}),
        },
    }


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
