"""Describes the route that makes pictures."""

from __future__ import annotations

from typing import Any

from headrace.frontend.api_description.operations import ERRORS, json_answer
from headrace.frontend.images import SCHEMAS

TYPES = SCHEMAS


def paths() -> dict[str, Any]:
    """Return the path."""
    schema = {"$ref": "#/components/schemas/ImageRequest"}
    return {
        "/v1/images/generations": {
            "post": {
                "summary": "Make pictures of a prompt",
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": json_answer("the pictures", "ImageAnswer")}
                | {status: json_answer(text, "ErrorAnswer") for status, text in ERRORS.items()},
            }
        }
    }
