"""Connects APIs that speak in messages (Responses, Messages) to the chat planner, by a port and the options they set."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

import msgspec

from headrace.frontend.generation.plan import GenerationPlan
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.schema.chat import ChatRequest


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that an API sets for a conversation and that no chat request has."""

    id_prefix: str
    at_most: int | None = None  # tokens per choice; unlike `max_tokens` it may exceed the room that the context leaves
    by_token: bool = False  # parse the answer token by token even if it is not streamed, to know which token has which text


class ChatAdapter(Protocol):
    """`headrace.frontend.openai.chat.ChatApi`, as APIs that speak in messages see it."""

    def plan_chat(self, request: ChatRequest, exchange: HttpExchange, options: ChatOptions) -> Awaitable[GenerationPlan]:
        """Plan the jobs that answer a conversation. Raises a FrontendError or an AdmissionError."""
