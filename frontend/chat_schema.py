"""The common fields of chat and completions requests.

Names, types and ranges are OpenAI's, plus the additions of vLLM's server. Unknown fields are ignored and reported. Ranges are
part of the types, so that one decode checks them and names the parameter, and `/openapi.json` shows them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, TypedDict

import msgspec
from msgspec import Meta

MAX_LOGPROBS = 20

HINTS = (  # to OpenAI's service and vLLM's server, and without effect here
    *("prediction", "verbosity", "safety_identifier", "moderation"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("stream_interval", "early_stopping", "length_penalty", "guided_decoding_backend", "return_token_offsets"),
    *("mm_payload", "return_mm_kwargs", "routed_experts_prompt_start"),
)

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
NonEmpty = Annotated[str, Meta(min_length=1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    """A schema that the answer must conform to."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's parameter for JSON, with vLLM's additions for text with tags: `format`, or `structures` and `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: Any = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's parameter for guided decoding: one of the first six fields, and options."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


TargetMs = Annotated[float, Meta(ge=0.0, le=1e9)]  # 0 is a target: it is always missed, so the soonest place is best


class RouterHints(msgspec.Struct, kw_only=True):
    """Dynamo's targets of a request, in milliseconds. The headers x-headrace-ttft-target and x-headrace-itl-target win."""

    ttft_target: TargetMs | None = None
    itl_target: TargetMs | None = None


class AgentHints(msgspec.Struct, kw_only=True):
    """Dynamo's hints of an agent. Those that are not listed are ignored."""

    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # for overrides of a grid of fleets


class Nvext(msgspec.Struct, kw_only=True):
    """The fields of Dynamo's extension that have an effect."""

    router: RouterHints | None = None
    agent_hints: AgentHints | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields of both APIs. `None` always means: not given."""

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None  # None = the only one that is served
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0 = off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    logprob_token_ids: list[TokenId] | None = None
    use_beam_search: bool | None = None
    watermarking: bool | None = None
    spaces_between_special_tokens: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 = none
    repetition_detection: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # lower is sooner
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")] | None = None
    session_id: Annotated[str, Meta(max_length=512)] | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None  # seconds; the header x-request-timeout-s wins
    vllm_xargs: dict[str, Any] | None = None
    nvext: Nvext | None = None
    request_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/+=-]{1,128}$")] | None = None  # becomes part of the answer's id
    user: str | None = None  # checked, without effect, as are the fields below
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    store: bool | None = None


MAX_GRAMMAR = 256 * 1024  # characters; a grammar becomes part of the prompt

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class FunctionCall(TypedDict, total=False):
    """A function called by an assistant. `arguments` is JSON text, as in answers; an object is accepted as well."""

    name: Required[NonEmpty]
    arguments: str | dict[str, Any] | None


class CustomCall(TypedDict, total=False):
    """A freeform tool called by an assistant, with its input as plain text."""

    name: Required[NonEmpty]
    input: str


class ToolCall(TypedDict, total=False):
    """A tool call in a message of the assistant: of a function, or of a freeform tool."""

    id: str
    type: Literal["function", "custom"]
    function: FunctionCall
    custom: CustomCall


class Message(TypedDict, total=False):
    """A message of a conversation. Fields that its role does not use are ignored."""

    role: Required[Annotated[str, Meta(min_length=1, max_length=64)]]
    content: str | list[dict[str, Any]] | None
    name: str | None
    tool_calls: list[ToolCall] | None
    tool_call_id: str | None
    reasoning_content: str | None
    reasoning: str | None


class Function(msgspec.Struct, kw_only=True):
    """A function the model may call; `parameters` is a JSON schema."""

    name: NonEmpty
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Grammar(msgspec.Struct, kw_only=True):
    """A grammar for the input of a freeform tool."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR)]


class InputFormat(msgspec.Struct, kw_only=True):
    """The format of a freeform tool's input. `grammar` is needed by the type of that name."""

    type: Literal["text", "grammar"]
    grammar: Grammar | None = None


class CustomTool(msgspec.Struct, kw_only=True):
    """A freeform tool: the model calls it with plain text."""

    name: NonEmpty
    description: str | None = None
    format: InputFormat | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool. Types other than `function` and `custom` are refused by name."""

    type: str = "function"
    function: Function | None = None
    custom: CustomTool | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    """The name of a tool."""

    name: NonEmpty


class NamedTool(msgspec.Struct, kw_only=True):
    """A tool by its name."""

    type: str = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that may be called. With `mode` required, one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class ToolChoice(msgspec.Struct, kw_only=True):
    """A tool by its name, or the allowed tools."""

    type: str = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """A conversation to be answered."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_prompt_text: bool | None = None


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
