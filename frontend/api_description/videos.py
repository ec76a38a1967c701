"""Describes the routes over videos."""

from __future__ import annotations

from typing import Any

from headrace.frontend.api_description.operations import ERRORS, PAGE, in_path, json_answer, stored_errors
from headrace.frontend.videos import SCHEMAS

TYPES = SCHEMAS


def paths() -> dict[str, Any]:
    """Return the paths."""
    schema = {"schema": {"$ref": "#/components/schemas/VideoRequest"}}
    stored = stored_errors()
    errors = {status: json_answer(text, "ErrorAnswer") for status, text in ERRORS.items()}
    file = {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}
    variant = {"name": "variant", "in": "query", "schema": {"type": "string", "enum": ["video"]}}
    gone = {**stored["400"], "description": "the file is not stored any more"}
    return {
        "/v1/videos": {
            "post": {
                "summary": "Make a video of a prompt",
                "requestBody": {"required": True, "content": {"application/json": schema, "multipart/form-data": schema}},
                "responses": {"200": json_answer("the video as it stands", "VideoObject")} | errors,
            },
            "get": {"summary": "List videos", "parameters": PAGE}
            | {"responses": {"200": json_answer("a page of videos", "VideoList")} | stored},
        },
        "/v1/videos/{id}": {
            "parameters": [in_path("id")],
            "get": {"summary": "A video"} | {"responses": {"200": json_answer("the video", "VideoObject")} | stored},
            "delete": {"summary": "Delete a video"}
            | {"responses": {"200": json_answer("the deleted video", "DeletedVideo")} | stored},
        },
        "/v1/videos/{id}/content": {
            "parameters": [in_path("id"), variant],
            "get": {
                "summary": "The file of a video",
                "responses": {"200": {"description": "the file", "content": file}, "410": gone} | stored,
            },
        },
    }
