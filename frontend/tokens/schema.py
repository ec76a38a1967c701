"""The bodies of `/tokenize` and `/detokenize`, as vLLM's server has them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.frontend.schema.chat import Message, Tool
from headrace.frontend.schema.common import TokenId


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A prompt, or a conversation. Without `model` the only one that is served."""

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # None = with a prompt yes, with a conversation the template's business
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """`token_strs` are the tokens as the vocabulary has them, not text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Without `model` the only one that is served."""

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The text, special tokens included."""

    prompt: str
