"""Describes the routes of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.frontend.anthropic.schema import AnthropicError, CountRequest, MessageAnswer, MessagesRequest, TokenCount
from headrace.frontend.api_description.operations import generation

TYPES: tuple[type[msgspec.Struct], ...] = (MessagesRequest, MessageAnswer, CountRequest, TokenCount, AnthropicError)


def paths() -> dict[str, Any]:
    """Return the paths of Anthropic's Messages API."""
    error = "AnthropicError"
    count = generation("Count a prompt", "CountRequest", "TokenCount", error=error, streams=False)
    answer = generation("Answer messages with a message", "MessagesRequest", "MessageAnswer", error=error)
    return {"/v1/messages": {"post": answer}, "/v1/messages/count_tokens": {"post": count}}
