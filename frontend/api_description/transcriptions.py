"""Describes the routes for transcriptions and translations of speech."""

from __future__ import annotations

from typing import Any

from headrace.frontend.api_description.operations import ERRORS, json_answer
from headrace.frontend.transcriptions import SCHEMAS

TYPES = SCHEMAS

_FIELDS: dict[str, Any] = {
    "file": {"type": "string", "format": "binary"},
    "model": {"type": "string"},
    "prompt": {"type": "string", "maxLength": 4096},
    "response_format": {"type": "string", "enum": ["json", "text"]},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "stream": {"type": "boolean"},
}


def paths() -> dict[str, Any]:
    """Return the paths of both tasks."""

    def asking(summary: str, fields: dict[str, Any]) -> dict[str, Any]:
        schema = {"type": "object", "required": ["file"], "properties": fields}
        answer = json_answer("the text; with `stream` server-sent events", "Transcript")
        answer["content"]["text/plain"] = {"schema": {"type": "string"}}
        answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        return {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}},
                "responses": {"200": answer} | {status: json_answer(text, "ErrorAnswer") for status, text in ERRORS.items()},
            }
        }

    return {
        "/v1/audio/transcriptions": asking("Transcribe speech", _FIELDS | {"language": {"type": "string"}}),
        "/v1/audio/translations": asking("Translate speech into English", _FIELDS),
    }
