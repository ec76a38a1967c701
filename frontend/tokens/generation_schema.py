"""The bodies of `/inference/v1/generate`, token ids in and token ids out, as in vLLM's server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.schema.answers import UNSET, ChatLogprobs, PromptLogprobs, UnsetType, Usage
from headrace.frontend.schema.common import (
    MAX_LOGPROBS,
    Int64,
    Penalty,
    Positive,
    StreamOptions,
    StructuredOutputs,
    TokenId,
)

OutputMode = Literal["tokens", "text"]


class TokenSampling(msgspec.Struct, kw_only=True):
    """The sampling parameters. `None` means: not given, which is vLLM's default and not that of the model."""

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Positive | None = None  # None = the model's default, or as many as fit
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    extra_args: dict[str, Any] | None = None
    # refused by name, if they ask for something
    logprob_token_ids: list[int] | None = None
    prompt_logprob_token_ids: list[Any] | None = None
    prompt_logprob_start: int | None = None
    repetition_detection: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    trace_decode_token_ids: list[int] | None = None
    watermarking: bool | None = None


class TokenGenerationRequest(msgspec.Struct, kw_only=True):
    """Token ids to continue. Without `model` the only served model is used. `output_mode` text adds the text."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: TokenSampling
    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    request_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/+=-]{1,128}$")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: OutputMode = "tokens"
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    token_offsets: list[Any] | None = None  # without effect: they say where the ids came from
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    features: dict[str, Any] | None = None
    content_parts: list[dict[str, Any]] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


class CandidateToken(msgspec.Struct, kw_only=True):
    """A token that could stand at a position. `rank` 1 is the likeliest; null = not among the alternatives."""

    token_id: int
    logprob: float
    rank: int | None = None


class SampledToken(CandidateToken, kw_only=True):
    """The token at a position with its alternatives: itself first, then the likeliest ones."""

    top_logprobs: list[CandidateToken]


class TokenLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a choice by token ids, one entry per token."""

    content: list[SampledToken]


class BaseChoice(msgspec.Struct, kw_only=True):
    """The fields of a choice in both modes, also of what a streamed event adds to it. The last three are never given."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int]
    routed_experts: None = None
    sampling_mask: None = None
    weight_versions: None = None


class TokenChoice(BaseChoice, kw_only=True):
    """A choice of `output_mode` tokens."""

    logprobs: TokenLogprobs | None = None


class TextChoice(BaseChoice, kw_only=True):
    """A choice of `output_mode` text."""

    text: str
    logprobs: ChatLogprobs | None = None


class BaseAnswer(msgspec.Struct, kw_only=True):
    """The fields of an answer in both modes. The last five are never given."""

    request_id: str
    model: str
    created: int
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_token_id_logprobs: None = None
    mm_placeholders: None = None
    metrics: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


class TokenGenerationAnswer(BaseAnswer, kw_only=True, tag_field="output_mode", tag="tokens"):
    """The answer of `POST /inference/v1/generate`."""

    choices: list[TokenChoice]


class TextGenerationAnswer(BaseAnswer, kw_only=True, tag_field="output_mode", tag="text"):
    """The answer of `POST /inference/v1/generate` with `output_mode` text."""

    choices: list[TextChoice]


class TokenGenerationEvent(msgspec.Struct, kw_only=True):
    """An event of a stream of token ids. The first one has the ids of the prompt, if they were asked for."""

    request_id: str
    output_mode: OutputMode
    choices: list[TokenChoice] | list[TextChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
