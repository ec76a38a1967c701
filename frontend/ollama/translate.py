"""Translates requests of Ollama's API into chat requests. Sans-io."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.tools import hosted_type
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.ollama.schema import (
    OllamaChatRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaPromptRequest,
    OllamaRequest,
)
from headrace.frontend.schema.chat import ChatRequest, Message
from headrace.frontend.schema.common import GenerationRequest, JsonSchema, ResponseFormat

_NEUTRAL = {"typical_p": 1.0, "tfs_z": 1.0, "mirostat": 0}
_NO_OPTIONS = OllamaOptions()


def chat_of(request: OllamaChatRequest, model: str) -> ChatRequest:
    """Return the chat request of a conversation. Raises BadRequest with the path of the field."""
    for index, tool in enumerate(request.tools or ()):
        if (
            tool.type != "function" and hosted_type(tool.type) is None
        ):  # a call of a freeform tool is text, and a call of this API an object
            raise unsupported(f"tools[{index}].type", f"{tool.type[:100]!r} is not supported here: function only")
    messages = _messages(request.messages or ())
    chat = ChatRequest(model=model, messages=messages, tools=request.tools or None)
    _set_common(request, chat)
    last = messages[-1]
    if last["role"] == "assistant" and last.get("content") and not last.get("tool_calls"):
        chat.continue_final_message, chat.add_generation_prompt = True, False
    return chat


def chat_of_prompt(request: OllamaPromptRequest, model: str) -> ChatRequest:
    """Return the chat request of a prompt that is to be put into the model's template. Raises BadRequest."""
    refuse(request)
    messages: list[Message] = [{"role": "system", "content": request.system}] if request.system else []
    content = _content(request.prompt or "", request.images)
    messages.append(cast("Message", {"role": "user", "content": content}))
    chat = ChatRequest(model=model, messages=messages)
    _set_common(request, chat)
    return chat


def raw_generation_of(request: OllamaPromptRequest, model: str) -> GenerationRequest:
    """Return the request of a prompt that is continued as it is. Raises BadRequest."""
    refuse(request)
    if request.images:
        raise unsupported("images", "cannot be combined with raw")
    if request.system:
        raise unsupported("system", "cannot be combined with raw")
    generation = GenerationRequest(model=model)
    _set_sampling(request, generation)
    return generation


def refuse(request: OllamaPromptRequest) -> None:
    """Refuse what would otherwise be ignored silently. Raises BadRequest."""
    if request.suffix:
        raise unsupported("suffix")
    if request.template:
        raise unsupported("template", "cannot be sent with a request; the model brings its own")
    if request.context:
        raise unsupported("context", "is not supported here: use /api/chat, which takes the messages so far")


def _set_common(request: OllamaRequest, chat: ChatRequest) -> None:
    _set_sampling(request, chat)
    if request.logprobs:
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs
    elif request.top_logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    think = request.think
    if isinstance(think, bool):
        chat.chat_template_kwargs = {"enable_thinking": think, "thinking": think}
    elif think is not None:
        chat.reasoning_effort = think


def _set_sampling(request: OllamaRequest, chat: GenerationRequest) -> None:
    options = request.options or _NO_OPTIONS
    for name, neutral in _NEUTRAL.items():
        if getattr(options, name) not in (None, neutral):
            raise unsupported(f"options.{name}")
    chat.stream = request.stream is not False
    chat.temperature, chat.top_p, chat.top_k, chat.min_p = options.temperature, options.top_p, options.top_k, options.min_p
    chat.repetition_penalty = options.repeat_penalty
    chat.presence_penalty, chat.frequency_penalty = options.presence_penalty, options.frequency_penalty
    chat.seed = options.seed if options.seed is not None and options.seed >= 0 else None
    chat.max_tokens = options.num_predict if (options.num_predict or 0) > 0 else None
    chat.stop = options.stop or None
    chat.response_format = _format(request.format)


def _format(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not given:
        return None
    if isinstance(given, dict):
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=given))
    if given == "json":
        return ResponseFormat(type="json_object")
    raise BadRequest(f'format must be "json" or a JSON schema, got {given[:100]!r}', param="format")


def _messages(given: Sequence[OllamaMessage]) -> list[Message]:
    """Return the messages of a chat. Calls have no ids in Ollama's API: results are theirs by name, else in their order."""
    messages: list[Message] = []
    open_calls: deque[tuple[str, str]] = deque()  # (id, name) of the calls without a result
    count = 0
    for message in given:
        plain: dict[str, Any] = {"role": message.role, "content": _content(message.content or "", message.images)}
        if message.thinking is not None and message.role == "assistant":
            plain["reasoning_content"] = message.thinking
        if message.role == "tool":
            _answer(message, open_calls, plain)
        elif message.tool_calls and message.role == "assistant":
            plain["tool_calls"] = []
            open_calls.clear()
            for call in message.tool_calls:
                count += 1
                call_id, name = call.id or f"call{count:05d}", call.function.name
                function = {"name": name, "arguments": call.function.arguments or {}}
                plain["tool_calls"].append({"id": call_id, "type": "function", "function": function})
                open_calls.append((call_id, name))
        messages.append(cast("Message", plain))
    return messages


def _answer(message: OllamaMessage, open_calls: deque[tuple[str, str]], plain: dict[str, Any]) -> None:
    call_id = message.tool_call_id
    if message.tool_name is not None:
        plain["name"] = message.tool_name
    if call_id is None and open_calls:
        call_id = next((id_ for id_, name in open_calls if name == message.tool_name), open_calls[0][0])
    if call_id is not None:
        plain["tool_call_id"] = call_id
        for call in [one for one in open_calls if one[0] == call_id]:
            open_calls.remove(call)


def _content(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """Return the content of a message; images come before the text, as in Ollama's own prompts."""
    if not images:
        return text
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": image if image.startswith("data:") else f"data:;base64,{image}"}}
        for image in images
    ]
    return [*parts, {"type": "text", "text": text}] if text else parts
