"""The bodies of `/tokenize` and `/detokenize`, as in vLLM's server."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.frontend.schema.chat import Message, Tool
from headrace.frontend.schema.common import TokenId


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A prompt or a conversation to tokenise. Without `model` the only served model is used."""

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # None = yes with a prompt; with a conversation the template adds them
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The tokens of a text. `token_strs` has the entries of the vocabulary, not text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Tokens to be turned into text. Without `model` the only served model is used."""

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The text of tokens, special tokens included."""

    prompt: str
