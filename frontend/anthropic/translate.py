"""Translates a request of the Messages API into a chat request. Sans-io."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from headrace.frontend.anthropic.schema import (
    Block,
    ClearThinking,
    ClearToolUses,
    MessageIn,
    MessagesRequest,
    PromptFields,
    ThinkingTurns,
    TokenAmount,
    ToolUseChoice,
)
from headrace.frontend.chat_schema import (
    ChatRequest,
    Function,
    FunctionName,
    JsonSchema,
    Message,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.request_checks import KNOWN_TOOLS, hosted_type
from headrace.frontend.http.bodies import list_at, mapping_at, missing, text_at, unsupported, wrong

# Converts the turns of the Messages API into the messages of a chat, by the rules of vLLM's server.

BILLING_HEADER = "x-anthropic-billing-header"


def messages_of(request: PromptFields, *, strip_billing: bool, merge_system: bool) -> list[Message]:
    """Return the messages of a chat. With `merge_system` all system messages become the first one.

    Raises BadRequest with the path of the field.
    """
    return _Messages(strip_billing=strip_billing, merge_system=merge_system).of(request)


def continues(messages: Sequence[Message]) -> bool:
    """Return True if the client has begun the answer, which the model has to continue."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last.get("content")) and not last.get("tool_calls")


class _Messages:
    def __init__(self, *, strip_billing: bool, merge_system: bool) -> None:
        self._strip = strip_billing
        self._merge = merge_system
        self._out: list[Message] = []

    def of(self, request: PromptFields) -> list[Message]:
        system = self._system(request.system, "system") if request.system is not None else ""
        if self._merge:
            system += "".join(
                self._system(m.content, f"messages[{i}].content") for i, m in enumerate(request.messages) if m.role == "system"
            )
        if system:
            self._out.append({"role": "system", "content": system})
        for i, message in enumerate(request.messages):
            self._turn(message, f"messages[{i}].content")
        if not self._out:
            raise BadRequest("messages must say something", param="messages")
        return self._out

    def _system(self, content: str | Sequence[Block], where: str) -> str:
        if isinstance(content, str):
            return self._stripped(content)
        texts = []
        for j, block in enumerate(content):
            place = f"{where}[{j}]"
            if _kind(block, place) != "text":
                raise unsupported(f"{place}.type", f"{block['type'][:100]!r} is not supported here: text only")
            texts.append(self._stripped(text_at(block, "text", place)))
        return "".join(texts)

    def _stripped(self, text: str) -> str:
        """Remove the billing line, which differs in every request and would make every prefix a new one."""
        if not self._strip or not text.startswith(BILLING_HEADER):
            return text
        return text.partition("\n")[2]

    def _turn(self, message: MessageIn, where: str) -> None:
        content = message.content
        if message.role == "system":
            if not self._merge and (text := self._system(content, where)):
                self._out.append({"role": "system", "content": text})
        elif isinstance(content, str):
            self._out.append({"role": message.role, "content": content})
        elif message.role == "assistant":
            self._assistant(content, where)
        else:
            self._user(content, where)

    def _user(self, content: Sequence[Block], where: str) -> None:
        parts: list[Block] = []
        for j, block in enumerate(content):
            place = f"{where}[{j}]"
            if _kind(block, place) == "tool_result":
                self._result(block, place)
            elif (part := _part(block, place)) is not None:
                parts.append(part)
        if parts:
            self._out.append(cast("Message", {"role": "user", "content": _short(parts)}))

    def _result(self, block: Block, where: str) -> None:
        """Add a tool result: its text as the tool's message, its images as a user message, as tools cannot have images."""
        content = block.get("content")
        texts: list[str] = []
        images: list[Block] = []
        if isinstance(content, str):
            texts.append(content)
        else:
            for j, inner in enumerate(list_at(content or (), f"{where}.content")):
                part = _part(inner, f"{where}.content[{j}]")
                if part is None:
                    continue
                if part["type"] == "text":
                    texts.append(part["text"])
                else:
                    images.append(part)
        call_id = text_at(block, "tool_use_id", where)
        self._out.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})
        if images:
            self._out.append(cast("Message", {"role": "user", "content": images}))

    def _assistant(self, content: Sequence[Block], where: str) -> None:
        message: Message = {"role": "assistant"}
        parts: list[Block] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for j, block in enumerate(content):
            place = f"{where}[{j}]"
            kind = _kind(block, place)
            if kind == "thinking":
                thoughts.append(text_at(block, "thinking", place))
            elif kind == "tool_use":
                calls.append(_call(block, place))
            elif kind != "redacted_thinking" and (part := _part(block, place)) is not None:
                parts.append(part)
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        if parts:
            message["content"] = _short(parts)
        self._out.append(message)


def _short(parts: list[Block]) -> str | list[Block]:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _call(block: Block, where: str) -> ToolCall:
    given = block.get("input")
    if given is not None and not isinstance(given, Mapping):
        raise wrong(f"{where}.input", "an object")
    name, call_id = text_at(block, "name", where), text_at(block, "id", where)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(given or {})}}


def _part(block: Any, where: str) -> Block | None:
    """Return a block as a part of a chat message; None if it is empty."""
    kind = _kind(block, where)
    if kind == "text":
        text = text_at(block, "text", where)
        return {"type": "text", "text": text} if text else None
    if kind == "tool_reference":  # what a client's own search for tools has found: it offers them from now on
        return {"type": "text", "text": f"The tool {text_at(block, 'tool_name', where)} can be called now."}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _image(block.get("source"), f"{where}.source")}}
    if kind == "document":
        source = mapping_at(block.get("source"), f"{where}.source")
        if source.get("type") == "text":
            return {"type": "text", "text": text_at(source, "data", f"{where}.source")}
        raise unsupported(f"{where}.source.type", f"{str(source.get('type'))[:100]!r} is not supported here: text only")
    raise unsupported(f"{where}.type", f"{kind[:100]!r} is not supported here")


def _image(source: Any, where: str) -> str:
    source = mapping_at(source, where)
    kind = text_at(source, "type", where)
    if kind == "url":
        return text_at(source, "url", where)
    if kind == "base64":
        return f"data:{text_at(source, 'media_type', where)};base64,{text_at(source, 'data', where)}"
    raise unsupported(f"{where}.type", f"{kind[:100]!r} is not supported here: base64 or url")


def _kind(block: Any, where: str) -> str:
    return text_at(mapping_at(block, where), "type", where)


# The edits that `context_management` asks for, in what the client has sent: it keeps the whole conversation and sends all of it
# again with each request.

CLEARED = "[The result of this tool call has been cleared.]"


def without_thinking(messages: Sequence[MessageIn], edit: ClearThinking) -> tuple[list[MessageIn], int]:
    """Return the messages without the thinking of earlier turns, and the number of turns that lost theirs."""
    if not isinstance(edit.keep, ThinkingTurns):
        return list(messages), 0
    turns: list[int] = []  # of each message; a turn goes on after results of tools
    for message in messages:
        follows = message.role != "user" or all(block.get("type") == "tool_result" for block in _blocks(message))
        turns.append(turns[-1] if turns and follows else len(turns))
    thinking = sorted({turn for turn, message in zip(turns, messages, strict=True) if any(map(_thinks, _blocks(message)))})
    cleared = frozenset(thinking[: -edit.keep.value])
    kept = []
    for turn, message in zip(turns, messages, strict=True):
        blocks = [block for block in _blocks(message) if turn not in cleared or not _thinks(block)]
        if blocks or not _blocks(message):  # a message of thinking alone is gone with it
            kept.append(_changed(message, blocks))
    return kept, len(cleared)


def without_results(messages: Sequence[MessageIn], edit: ClearToolUses, tokens: int) -> tuple[list[MessageIn], int]:
    """Return the messages without results of earlier tool uses, and their number. `tokens` is the length of the prompt."""
    uses = [block for message in messages for block in _blocks(message) if block.get("type") == "tool_use"]
    if (tokens if isinstance(edit.trigger, TokenAmount) else len(uses)) <= edit.trigger.value:
        return list(messages), 0
    excluded = edit.exclude_tools or ()
    earlier = uses[: max(0, len(uses) - edit.keep.value)]
    names = {str(use.get("id")): str(use.get("name")) for use in earlier if use.get("name") not in excluded}
    cleared = 0

    def edited(block: Block) -> Block:
        nonlocal cleared
        if block.get("type") == "tool_result" and str(block.get("tool_use_id")) in names:
            cleared += 1
            return {**block, "content": CLEARED}
        if block.get("type") == "tool_use" and (name := names.get(str(block.get("id")))) is not None:
            inputs = edit.clear_tool_inputs
            if inputs is True or (inputs and name in inputs):
                return {**block, "input": {}}
        return block

    return [_changed(message, [edited(block) for block in _blocks(message)]) for message in messages], cleared


def _blocks(message: MessageIn) -> Sequence[Block]:
    return message.content if not isinstance(message.content, str) else ({"type": "text", "text": message.content},)


def _thinks(block: Block) -> bool:
    return block.get("type") in ("thinking", "redacted_thinking")


def _changed(message: MessageIn, blocks: list[Block]) -> MessageIn:
    return message if isinstance(message.content, str) else MessageIn(role=message.role, content=blocks)


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(request: PromptFields, *, strip_billing: bool, merge_system: bool = False) -> ChatRequest:
    """Return the chat request. With `merge_system` all system messages become the first one, as some templates require.

    Raises BadRequest with the path of the field.
    """
    _refuse(request)
    tools = _tools(request.tools)
    chat = ChatRequest(
        model=request.model,
        messages=messages_of(request, strip_billing=strip_billing, merge_system=merge_system),
        tools=tools or None,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    _choose(request.tool_choice, tools, chat)
    _think(request, chat)
    if isinstance(request, MessagesRequest):
        _sampling(request, chat)
    if continues(chat.messages):
        chat.continue_final_message, chat.add_generation_prompt = True, False
    return chat


def has_inline_system(request: PromptFields) -> bool:
    return any(message.role == "system" for message in request.messages)


def _refuse(request: PromptFields) -> None:
    if request.mcp_servers:
        raise unsupported("mcp_servers")
    if request.container is not None:
        raise unsupported("container")


def _tools(given: Iterable[Mapping[str, Any]] | None) -> list[Tool]:
    tools = []
    for i, tool in enumerate(given or ()):
        where = f"tools[{i}]"
        kind = tool.get("type")
        if isinstance(kind, str) and hosted_type(kind) is not None:
            tools.append(Tool(type=kind))
            continue
        if kind not in (None, "custom"):
            raise unsupported(f"{where}.type", f"{str(kind)[:100]!r} {KNOWN_TOOLS}")
        schema = dict(mapping_at(tool.get("input_schema"), f"{where}.input_schema"))
        schema.setdefault("type", "object")
        function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
        try:
            tools.append(Tool(function=msgspec.convert({**function, "strict": tool.get("strict")}, Function)))
        except msgspec.ValidationError as error:
            raise BadRequest(f"invalid value for {where}: {error}", param=where) from None
    return tools


def _choose(choice: ToolUseChoice | None, tools: list[Tool], chat: ChatRequest) -> None:
    if choice is None:
        return
    if choice.disable_parallel_tool_use is not None:
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if not tools:
        if choice.type in ("any", "tool"):
            raise BadRequest("tool_choice needs tools", param="tool_choice")
        return
    if choice.type != "tool":
        chat.tool_choice = _CHOICES[choice.type]
        return
    if not choice.name:
        param = "tool_choice.name"
        raise missing(param)
    chat.tool_choice = ToolChoice(function=FunctionName(name=choice.name))


def _think(request: PromptFields, chat: ChatRequest) -> None:
    """Set the options of reasoning. Templates have two names for the switch, and may ignore both."""
    config = request.output_config
    if config is not None and config.effort is not None:
        chat.reasoning_effort = config.effort
    shape = (config.format if config is not None else None) or request.output_format
    if shape is not None:
        if shape.schema is None:
            param = "output_config.format.schema"
            raise missing(param)
        chat.response_format = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=shape.schema))
    thinking = request.thinking
    if thinking is None:
        return
    on = thinking.type != "disabled"
    chat.chat_template_kwargs = {"enable_thinking": on, "thinking": on, **(request.chat_template_kwargs or {})}
    if thinking.type == "enabled":
        param = "thinking.budget_tokens"
        if thinking.budget_tokens is None:
            raise missing(param)
        if isinstance(request, MessagesRequest) and thinking.budget_tokens >= request.max_tokens:
            message = f"{param} ({thinking.budget_tokens}) must be less than max_tokens ({request.max_tokens})"
            raise BadRequest(message, param=param)
        chat.thinking_token_budget = thinking.budget_tokens


def _sampling(request: MessagesRequest, chat: ChatRequest) -> None:
    chat.stream = request.stream
    chat.stop = request.stop_sequences or None
    chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
    chat.cache_salt, chat.vllm_xargs = request.cache_salt, request.vllm_xargs
    chat.priority, chat.timeout = request.priority, request.timeout
    chat.nvext = request.nvext
    user = request.metadata.user_id if request.metadata else None
    chat.session_id = request.session_id or user or None
