"""Describes the routes that take and give token ids."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.frontend.api_description.operations import either, generation
from headrace.frontend.tokens.generation_schema import TextGenerationAnswer, TokenGenerationAnswer, TokenGenerationRequest
from headrace.frontend.tokens.schema import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

TYPES: tuple[type[msgspec.Struct], ...] = (
    TokenGenerationRequest,
    TokenGenerationAnswer,
    TextGenerationAnswer,
    TokenizeRequest,
    TokenizeAnswer,
    DetokenizeRequest,
    DetokenizeAnswer,
)


def paths() -> dict[str, Any]:
    """Return the paths that continue token ids, tokenise and put text together again."""
    continued = generation("Continue token ids with token ids", "TokenGenerationRequest", "TokenGenerationAnswer")
    continued["responses"]["200"]["content"] |= either("", "TokenGenerationAnswer", "TextGenerationAnswer")["content"]
    tokenized = generation("Text to tokens", "TokenizeRequest", "TokenizeAnswer", streams=False)
    detokenized = generation("Tokens to text", "DetokenizeRequest", "DetokenizeAnswer", streams=False)
    return {
        "/v1/tokenize": {"post": tokenized},
        "/tokenize": {"post": tokenized},
        "/v1/detokenize": {"post": detokenized},
        "/detokenize": {"post": detokenized},
        "/inference/v1/generate": {"post": continued},
    }
