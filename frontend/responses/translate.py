"""Translates a request of the Responses API into a chat request. Sans-io: the caller reads the conversation so far."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.frontend.errors import BadRequest
from headrace.frontend.http.field_checks import missing, unsupported
from headrace.frontend.responses.items import Item, MessageBuilder
from headrace.frontend.responses.schema import ConversationInput, InputTokensRequest, Items, ResponsesRequest, TextFormat
from headrace.frontend.responses.toolset import Toolset, choice_of
from headrace.frontend.schema.chat import ChatRequest, Message
from headrace.frontend.schema.common import JsonSchema, ResponseFormat

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "reasoning.encrypted_content",  # reasoning is returned in plain text, which serves the same purpose
        "message.input_image.image_url",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)


def refuse_unknown(request: ConversationInput) -> None:
    """Refuse parameters of this API that are not supported here. Raises BadRequest."""
    if request.conversation is not None and request.previous_response_id is not None:
        raise BadRequest("conversation cannot be combined with previous_response_id", param="conversation")
    if request.prompt is not None:
        raise unsupported("prompt", "templates are not stored here; send instructions and input")
    if request.context_management:
        raise unsupported("context_management", "is not done while an answer is made; use /v1/responses/compact")
    if isinstance(request, ResponsesRequest):
        if request.background and request.store is False:
            raise BadRequest("background needs store: the answer is read from the store", param="background")
        if request.stream_options is not None and not request.stream:
            raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")
        for i, name in enumerate(request.include or ()):
            if name not in INCLUDABLE:
                raise BadRequest(
                    f"include[{i}] must be one of {', '.join(sorted(INCLUDABLE))}, got {name[:100]!r}", param=f"include[{i}]"
                )


def messages_of(
    instructions: str | None, before: Iterable[Item], items: Items, toolset: Toolset | None = None
) -> list[Message]:
    """Return the messages of a chat. `before` has the items of earlier turns, whose instructions are dropped.

    Raises BadRequest.
    """
    builder = MessageBuilder(toolset)
    if instructions:
        builder.instruct(instructions)
    for item in before:
        builder.add(item, "previous_response_id")
    for i, item in enumerate(items):
        builder.add(item, f"input[{i}]")
    if not builder.messages:
        raise BadRequest("input must not be empty", param="input")
    return builder.messages


def continues(items: Items) -> bool:
    """Return True if the last item is an incomplete answer, which the model has to continue."""
    last = items[-1] if items else {}
    return last.get("role") == "assistant" and last.get("status") in ("in_progress", "incomplete")


def chat_request(
    request: ResponsesRequest | InputTokensRequest, messages: list[Message], toolset: Toolset, *, go_on: bool = False
) -> ChatRequest:
    """Return the chat request. With `go_on` the model continues the last message. Raises BadRequest."""
    tools, choice = toolset.tools, choice_of(request.tool_choice, toolset)
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        tools=tools or None,
        tool_choice=choice if tools else None,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text.format) if request.text and request.text.format else None,
        truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    if go_on:
        chat.continue_final_message, chat.add_generation_prompt = True, False
    if request.tool_choice not in (None, "auto", "none") and not tools:
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    if request.reasoning is not None:
        chat.reasoning_effort = request.reasoning.effort
    if isinstance(request, ResponsesRequest):
        _sampling(request, chat)
    return chat


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Return True if log probabilities are requested, by `include` or by their number."""
    return LOGPROBS in (request.include or ()) or bool(request.top_logprobs)


_SAME = (
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
    "priority",
    "service_tier",
    "cache_salt",
    "timeout",
    "vllm_xargs",
    "user",
    "include_reasoning",
)


def _sampling(request: ResponsesRequest, chat: ChatRequest) -> None:
    for name in _SAME:
        setattr(chat, name, getattr(request, name))
    chat.nvext = request.nvext
    chat.session_id = request.session_id or request.prompt_cache_key or None
    if wants_logprobs(request):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs or 0


def _format(text: TextFormat) -> ResponseFormat | None:
    if text.type == "text":
        return None
    if text.type == "json_object":
        return ResponseFormat(type="json_object")
    if text.schema is None:
        raise missing("text.format.schema")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(name=text.name, schema=text.schema, strict=text.strict))
