"""Describes the routes of Ollama's API."""

from __future__ import annotations

from typing import Any

from headrace.frontend.api_description.operations import generation, json_answer, operation
from headrace.frontend.ollama.schema import SCHEMAS

TYPES = SCHEMAS


def paths() -> dict[str, Any]:
    """Return the paths of Ollama's API."""

    def asking(summary: str, request: str, answer: str, *, streams: bool = False) -> dict[str, Any]:
        post = generation(summary, request, answer, error="OllamaFault", streams=False)
        if streams:
            post["responses"]["200"]["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
        return {"post": post}

    models = {"200": json_answer("the models", "OllamaModels")}
    return {
        "/api/chat": asking("Answer a conversation, in lines", "OllamaChatRequest", "OllamaChatAnswer", streams=True),
        "/api/generate": asking("Answer a prompt, in lines", "OllamaPromptRequest", "OllamaPromptAnswer", streams=True),
        "/api/embed": asking("Embed texts", "OllamaEmbedRequest", "OllamaEmbedAnswer"),
        "/api/embeddings": asking("Embed a text, in the older form", "OllamaVectorRequest", "OllamaVectorAnswer"),
        "/api/show": asking("Describe a model", "OllamaShowRequest", "OllamaShown"),
        "/api/tags": {"get": operation("List the served models", models)},
        "/api/ps": {"get": operation("List the loaded models, which are the served ones", models)},
        "/api/version": {"get": operation("The version of the API", {"200": json_answer("the version", "OllamaVersion")})},
    }
