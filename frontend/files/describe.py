"""Describes the routes over files and uploads for the OpenAPI document."""

from __future__ import annotations

from typing import Any, get_args

from headrace.frontend.files.schema import Purpose

_TEXT = {"type": "string"}
_BINARY = {"type": "string", "format": "binary"}


def file_paths(errors: dict[str, Any]) -> dict[str, Any]:
    """Return the paths. `errors` are the answers of routes over stored objects that are no success."""
    full = {**errors["400"], "description": "the tenant has as many files or bytes as it may have"}
    wrong = {**errors, "403": full, "429": {**errors["503"], "description": "too many requests; see Retry-After"}}

    def operation(summary: str, answer: str, body: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        reference = {"application/json": {"schema": _reference(answer)}}
        described = {
            "summary": summary,
            "responses": {"200": {"description": "the answer", "content": reference}, **wrong},
            **more,
        }
        return described if body is None else {**described, "requestBody": {"required": True, "content": body}}

    page = [
        _query("purpose", _TEXT),
        _query("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}),
        _query("order", {"type": "string", "enum": ["asc", "desc"]}),
        _query("after", _TEXT),
    ]
    form = {
        "file": _BINARY,
        "purpose": {"type": "string", "enum": list(get_args(Purpose))},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    }
    content = {"application/octet-stream": {"schema": _BINARY}}
    download = {
        "200": {"description": "the content", "content": content},
        "206": {"description": "the wanted range", "content": content},
        "416": {**errors["400"], "description": "the range lies behind the end"},
        **wrong,
    }
    in_path = {"name": "id", "in": "path", "required": True, "schema": _TEXT}
    return {
        "/v1/files": {
            "post": operation("Upload a file", "FileObject", _form(form, ["file", "purpose"])),
            "get": operation("List files", "FileList", parameters=page),
        },
        "/v1/files/{id}": {
            "parameters": [in_path],
            "get": operation("A file", "FileObject"),
            "delete": operation("Delete a file", "DeletedFile"),
        },
        "/v1/files/{id}/content": {
            "parameters": [in_path, {"name": "range", "in": "header", "schema": _TEXT}],
            "get": {"summary": "The content of a file", "responses": download},
        },
        "/v1/uploads": {"post": operation("Open an upload in parts", "UploadObject", _json("NewUpload"))},
        "/v1/uploads/{id}/parts": {
            "parameters": [in_path],
            "post": operation("Add a part", "UploadPart", _form({"data": _BINARY}, ["data"])),
        },
        "/v1/uploads/{id}/complete": {
            "parameters": [in_path],
            "post": operation("Make a file of the parts", "UploadObject", _json("UploadCompletion")),
        },
        "/v1/uploads/{id}/cancel": {"parameters": [in_path], "post": operation("Cancel an upload", "UploadObject")},
    }


def _reference(schema: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": _reference(schema)}}


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


def _form(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"multipart/form-data": {"schema": {"type": "object", "properties": properties, "required": required}}}
