"""The request of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headrace.frontend.schema.common import MAX_LOGPROBS, GenerationRequest

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(GenerationRequest, kw_only=True):
    """Prompts to continue."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)] | None = None  # text, ids, or a list of either
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # 0 only with echo
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None
