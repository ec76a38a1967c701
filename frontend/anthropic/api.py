"""Plans requests of Anthropic's Messages API, counts their tokens, and describes models in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import Any, Literal

import msgspec

from headrace.broker.jobs import parts_of
from headrace.broker.messages.frames import Finish, Row
from headrace.frontend.answer_schema import UNSET, UnsetType
from headrace.frontend.anthropic.schema import (
    HINTS,
    AnswerBlock,
    AnthropicError,
    AnthropicForm,
    AppliedEdits,
    ClearThinking,
    ClearToolUses,
    CountRequest,
    MessageAnswer,
    MessagesRequest,
    MessageUsage,
    OriginalTokens,
    PromptFields,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ThinkingCleared,
    ThinkingCount,
    TokenCount,
    ToolUseBlock,
    ToolUsesCleared,
    speaks_anthropic,
)
from headrace.frontend.anthropic.translate import chat_request, has_inline_system, without_results, without_thinking
from headrace.frontend.apis import HttpApi, Site
from headrace.frontend.errors import BadRequest, ContextTooLong, FrontendError
from headrace.frontend.generation.content_blocks import ContentBlock, ContentBlocks, arguments_of
from headrace.frontend.generation.plan import GenerationPlan, Plan
from headrace.frontend.generation.sse import Head, StreamWriter, UsageCounter, WholeWriter
from headrace.frontend.http.bodies import ReportingDecoder, decode_request
from headrace.frontend.http.exchange import HttpExchange, shown_id
from headrace.frontend.openai.api import chat_api
from headrace.frontend.openai.chat import ChatAdapter, ChatOptions
from headrace.frontend.openapi import generation
from headrace.frontend.ports import Served
from headrace.frontend.settings import FrontendSettings

# Writes rows as a message of the Messages API: as events per block, or as a whole.

_encode = msgspec.json.Encoder().encode

Edits = AppliedEdits | UnsetType
"""The edits that `context_management` has applied; unset = the request has none."""

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def signature_of(head: Head, block: ContentBlock) -> str:
    """Return an opaque signature for a block of thinking. It proves nothing and is never checked."""
    return sha256(f"{head.id}:{block.index}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason why a message stopped. `sequence` is the stop sequence that ended it."""

    reason: StopReason
    sequence: str | None = None


def ending_of(fin: Finish, blocks: ContentBlocks, *, short: bool) -> Ending:
    """Return the ending of a message. `short`: the context had room for fewer tokens than requested."""
    if fin.reason == "length":
        return Ending("model_context_window_exceeded" if short else "max_tokens")
    if fin.reason == "content_filter":
        return Ending("refusal")
    last = blocks.all[-1]
    called = any(block.kind == "tool" for block in blocks.all)
    stopped = isinstance(fin.stop, str)
    if called and not (stopped and last.kind == "tool" and not _complete(last)):
        return Ending("tool_use")
    if isinstance(fin.stop, str):  # a truncated call must not run
        return Ending("stop_sequence", fin.stop)
    return Ending("end_turn")


def _complete(block: ContentBlock) -> bool:
    try:
        msgspec.json.decode(block.text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def usage_of(counter: UsageCounter, *, ended: bool) -> MessageUsage:
    """Return the token usage. The number of cached tokens is known only at the end."""
    cached = counter.cached if ended else 0
    thought = ThinkingCount(thinking_tokens=counter.reasoning) if ended and counter.reasoning is not None else None
    return MessageUsage(
        input_tokens=counter.prompt - cached,
        cache_read_input_tokens=cached,
        output_tokens=counter.completion,
        output_tokens_details=thought,
    )


class MessageWriter(WholeWriter):
    def __init__(self, head: Head, counter: UsageCounter, *, short: bool = False, edits: Edits = UNSET) -> None:
        self.open = 1
        self._edits = edits
        self._head = head
        self._counter = counter
        self._short = short
        self._blocks = ContentBlocks()
        self._ending = Ending("end_turn")

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            self._counter.completion += len(row.ids)
            self._blocks.take(parts_of(row.texts))
            if (fin := row.fin) is not None:
                if fin.tail:
                    self._blocks.take(parts_of([fin.tail]))
                self._blocks.end()
                self._ending = ending_of(fin, self._blocks, short=self._short)
                self._counter.end(0, fin)
                self.open -= 1

    def body(self) -> bytes:
        head, ending = self._head, self._ending
        return _encode(
            MessageAnswer(
                id=head.id,
                model=head.model,
                content=[self._block(block) for block in self._blocks.all],
                stop_reason=ending.reason,
                stop_sequence=ending.sequence,
                usage=usage_of(self._counter, ended=True),
                context_management=self._edits,
            )
        )

    def _block(self, block: ContentBlock) -> AnswerBlock:
        if block.kind == "content":
            return TextBlock(text=block.text)
        if block.kind == "reasoning":
            return ThinkingBlock(thinking=block.text, signature=signature_of(self._head, block))
        return ToolUseBlock(id=block.id, name=block.name, input=arguments_of(block, self._head.id))


class MessageEvents(StreamWriter):
    def __init__(
        self, head: Head, counter: UsageCounter, form: AnthropicForm, *, short: bool = False, edits: Edits = UNSET
    ) -> None:
        self.open = 1
        self._edits = b"" if edits is UNSET else b',"context_management":%b' % _encode(edits)
        self._head = head
        self._counter = counter
        self._form = form
        self._short = short
        self._blocks = ContentBlocks()
        self._ending = Ending("end_turn")
        self._begun = False
        self._around: tuple[bytes, bytes] = (b"", b"")  # around a piece of text of the open block
        self._out: list[bytes] = []

    def events(self, rows: list[Row]) -> bytes:
        if not self._begun:
            self._begin()
        for row in rows:
            self._counter.completion += len(row.ids)
            self._take(row.texts)
            if (fin := row.fin) is not None:
                self._end(fin)
        out = b"".join(self._out)
        self._out.clear()
        return out

    def closing(self) -> bytes:
        delta = {"stop_reason": self._ending.reason, "stop_sequence": self._ending.sequence}
        usage = usage_of(self._counter, ended=True)
        inner = b'"delta":%b,"usage":%b%b' % (_encode(delta), _encode(usage), self._edits)
        return self._event("message_delta", inner) + STOP

    def failure(self, error: FrontendError) -> bytes:
        """Return the error event. No message_stop follows, because the message is not complete."""
        out = b"".join(self._out)
        self._out.clear()
        return out + self._form.event(error)

    def _begin(self) -> None:
        self._begun = True
        head = self._head
        message = MessageAnswer(id=head.id, model=head.model, content=[], usage=usage_of(self._counter, ended=False))
        self._out += (self._event("message_start", b'"message":' + _encode(message)), PING)

    def _take(self, texts: list[Any]) -> None:
        for what, block, text in self._blocks.take(parts_of(texts)):
            self._step(what, block, text)

    def _end(self, fin: Finish) -> None:
        if fin.tail:
            self._take([fin.tail])
        for what, block, text in self._blocks.end():
            self._step(what, block, text)
        self._ending = ending_of(fin, self._blocks, short=self._short)
        self._counter.end(0, fin)
        self.open -= 1

    def _step(self, what: str, block: ContentBlock, text: str) -> None:
        if what == "text":
            before, after = self._around
            self._out.append(before + _encode(text) + after)
        elif what == "open":
            self._open(block)
        else:
            if block.kind == "reasoning":
                signature = {"type": "signature_delta", "signature": signature_of(self._head, block)}
                inner = b'"index":%d,"delta":%b' % (block.index, _encode(signature))
                self._out.append(self._event("content_block_delta", inner))
            self._out.append(self._event("content_block_stop", b'"index":%d' % block.index))

    def _open(self, block: ContentBlock) -> None:
        empty: AnswerBlock
        if block.kind == "content":
            empty, kind, key = TextBlock(text=""), b"text_delta", b"text"
        elif block.kind == "reasoning":
            empty, kind, key = ThinkingBlock(thinking="", signature=""), b"thinking_delta", b"thinking"
        else:
            empty, kind, key = ToolUseBlock(id=block.id, name=block.name, input={}), b"input_json_delta", b"partial_json"
        self._out.append(self._event("content_block_start", b'"index":%d,"content_block":%b' % (block.index, _encode(empty))))
        name = b"content_block_delta"
        start = b'event: %b\ndata: {"type":"%b","index":%d,"delta":{"type":"%b","%b":' % (name, name, block.index, kind, key)
        self._around = (start, b"}}\n\n")

    @staticmethod
    def _event(kind: str, inner: bytes) -> bytes:
        name = kind.encode()
        return b'event: %b\ndata: {"type":"%b",%b}\n\n' % (name, name, inner)


ID_PREFIX = "msg_"
REQUEST_ID = b"request-id"  # the header that Anthropic's clients read

_Edited = tuple[GenerationPlan | ContextTooLong, int, list[ThinkingCleared | ToolUsesCleared]]
"""A plan or the error that refuses it, the tokens of the prompt before the edits, and the edits that changed it."""

_decoder = ReportingDecoder(MessagesRequest, HINTS)
_counted = ReportingDecoder(CountRequest, HINTS)


class MessagesApi:
    """Plans messages. The headers `x-api-key`, `anthropic-version` and `anthropic-beta` are ignored."""

    def __init__(self, chat: ChatAdapter, settings: FrontendSettings) -> None:
        self._chat = chat
        self._settings = settings
        self.error_form = AnthropicForm()

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        _add_request_id(exchange)
        request = await decode_request(_decoder, body)
        options = ChatOptions(id_prefix=ID_PREFIX, at_most=request.max_tokens)
        outcome, _, applied = await self._edited(request, exchange, options)
        if isinstance(outcome, ContextTooLong):
            raise outcome
        edits = UNSET if request.context_management is None else AppliedEdits(applied_edits=applied)
        writer: StreamWriter | WholeWriter
        if request.stream:
            writer = MessageEvents(outcome.head, outcome.counter, self.error_form, short=outcome.short, edits=edits)
        else:
            writer = MessageWriter(outcome.head, outcome.counter, short=outcome.short, edits=edits)
        return outcome.answered_by(writer)

    async def count(self, body: bytes, exchange: HttpExchange) -> bytes:
        """Count the tokens of a prompt, also of one that is too long. Raises as `plan`."""
        _add_request_id(exchange)
        request = await decode_request(_counted, body)
        outcome, original, _ = await self._edited(request, exchange, ChatOptions(id_prefix=ID_PREFIX, counts_tools=False))
        if isinstance(outcome, ContextTooLong) and outcome.tokens is None:
            raise outcome
        count = TokenCount(input_tokens=_tokens(outcome))
        if request.context_management is not None:
            count.context_management = OriginalTokens(original_input_tokens=original)
        return msgspec.json.encode(count)

    async def _edited(self, request: PromptFields, exchange: HttpExchange, options: ChatOptions) -> _Edited:
        """Plan a conversation with the edits that it asks for. Raises as `plan`, but for a prompt that is too long."""
        outcome = await self._attempt(request, exchange, options)
        original, applied = _tokens(outcome), list[ThinkingCleared | ToolUsesCleared]()
        management = request.context_management
        edits = (management.edits if management is not None else None) or ()
        for edit in sorted(edits, key=lambda edit: isinstance(edit, ClearToolUses)):
            before = _tokens(outcome)
            if isinstance(edit, ClearThinking):
                messages, cleared = without_thinking(request.messages, edit)
            else:
                messages, cleared = without_results(request.messages, edit, before)
            if not cleared:
                continue
            if isinstance(outcome, GenerationPlan):
                exchange.plan_again(outcome.jobs[0].id)
                options = msgspec.structs.replace(options, counts_tools=False)
            shorter = msgspec.structs.replace(request, messages=messages)
            again = await self._attempt(shorter, exchange, options)
            saved = max(0, before - _tokens(again))
            if isinstance(edit, ClearThinking):
                applied.append(ThinkingCleared(cleared_thinking_turns=cleared, cleared_input_tokens=saved))
            elif edit.clear_at_least is not None and saved < edit.clear_at_least.value:
                continue
            else:
                applied.append(ToolUsesCleared(cleared_tool_uses=cleared, cleared_input_tokens=saved))
            request, outcome = shorter, again
        return outcome, original, applied

    async def _attempt(
        self, request: PromptFields, exchange: HttpExchange, options: ChatOptions
    ) -> GenerationPlan | ContextTooLong:
        try:
            return await self._plan(request, exchange, options)
        except ContextTooLong as error:
            return error

    async def _plan(self, request: PromptFields, exchange: HttpExchange, options: ChatOptions) -> GenerationPlan:
        strip = self._settings.strip_billing_header
        try:
            chat = await exchange.aside(partial(chat_request, request, strip_billing=strip))
            return await self._chat.plan_chat(chat, exchange, options)
        except BadRequest as error:
            if error.param == "stop":
                error.param = "stop_sequences"
            if error.code != "template_error" or not has_inline_system(request):
                raise
            # the template accepts system messages at the beginning only
            merged = await exchange.aside(partial(chat_request, request, strip_billing=strip, merge_system=True))
            return await self._chat.plan_chat(merged, exchange, options)


def _tokens(outcome: GenerationPlan | ContextTooLong) -> int:
    """Return the length of a prompt; of one that is too long to be counted, the least that it is."""
    if isinstance(outcome, ContextTooLong):
        return outcome.tokens or (outcome.most or 0) + 1
    return outcome.jobs[0].prompt_tokens


def _add_request_id(exchange: HttpExchange) -> None:
    exchange.more_headers.append((REQUEST_ID, shown_id(exchange.scope).encode()))


DEFAULT_LIMIT = 20  # Anthropic's
MOST_LIMIT = 1000


class Support(msgspec.Struct, kw_only=True):
    """A capability that a model has or has not."""

    supported: bool


class EffortSupport(Support, kw_only=True):
    """The levels of effort that requests may name. What a level does is decided by the model's template."""

    low: Support
    medium: Support
    high: Support
    xhigh: Support
    max: Support


class ContextManagementSupport(Support, kw_only=True):
    """The edits of conversations that requests may ask for."""

    clear_thinking_20251015: Support
    clear_tool_uses_20250919: Support
    compact_20260112: Support


class ServerToolSupport(Support, kw_only=True):
    """The tools that would run on this server, of which there are none."""

    web_search: Support
    code_execution: Support


class ThinkingTypes(msgspec.Struct, kw_only=True):
    """The values of `thinking.type` that requests may have."""

    enabled: Support
    disabled: Support
    adaptive: Support
    between_tools: Support


class ThinkingSupport(Support, kw_only=True):
    """Reasoning that is returned as thinking blocks."""

    types: ThinkingTypes


class Capabilities(msgspec.Struct, kw_only=True):
    """The capabilities of a model, by the names of Anthropic's API."""

    batch: Support
    citations: Support
    code_execution: Support
    context_management: ContextManagementSupport
    effort: EffortSupport
    image_input: Support
    pdf_input: Support
    server_tools: ServerToolSupport
    structured_outputs: Support
    thinking: ThinkingSupport


class AnthropicModel(msgspec.Struct, kw_only=True):
    """A served model. `max_input_tokens` is the context length, which input and output share."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int
    capabilities: Capabilities


class AnthropicModelList(msgspec.Struct, kw_only=True):
    """A page of the served models."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_entry(served: Served) -> AnthropicModel:
    card = served.card
    name = served.name
    return AnthropicModel(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(int(card.created), UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=card.context_length,
        max_tokens=card.context_length,
        capabilities=_capabilities(served),
    )


def model_page(models: Sequence[Served], query: Mapping[str, str]) -> AnthropicModelList:
    """Return the page that `limit`, `after_id` and `before_id` name. Raises BadRequest."""
    entries = [model_entry(served) for served in models]
    ids = [entry.id for entry in entries]
    limit = _limit(query.get("limit"))
    start, end = 0, len(entries)
    if after := query.get("after_id"):
        start = _place(ids, after, "after_id") + 1
    if before := query.get("before_id"):
        end = _place(ids, before, "before_id")
    if before and not after:  # the page that ends before this entry
        has_more = end - limit > start
        start = max(start, end - limit)
    else:
        has_more = end - start > limit
        end = min(end, start + limit)
    page = entries[start:end]
    return AnthropicModelList(
        data=page,
        has_more=has_more,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_LIMIT
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= MOST_LIMIT:
        raise BadRequest(f"limit must be a number from 1 to {MOST_LIMIT}, got {given[:100]!r}", param="limit")
    return int(given)


def _place(ids: Sequence[str], name: str, param: str) -> int:
    if name not in ids:
        raise BadRequest(f"{param} {name[:100]!r} is none of the served models", param=param)
    return ids.index(name)


def _capabilities(served: Served) -> Capabilities:
    card = served.card
    no = Support(supported=False)
    chat = Support(supported="chat" in card.kinds)
    reasons = card.reasoning_parser is not None
    level = Support(supported=reasons)
    types = ThinkingTypes(enabled=chat, disabled=chat, adaptive=chat, between_tools=chat)
    return Capabilities(
        batch=no,
        citations=no,
        code_execution=no,
        context_management=ContextManagementSupport(
            supported=chat.supported, clear_thinking_20251015=chat, clear_tool_uses_20250919=chat, compact_20260112=no
        ),
        effort=EffortSupport(supported=reasons, low=level, medium=level, high=level, xhigh=level, max=level),
        image_input=Support(supported="image" in card.media),
        pdf_input=no,
        server_tools=ServerToolSupport(supported=False, web_search=no, code_execution=no),
        structured_outputs=chat,
        thinking=ThinkingSupport(supported=reasons, types=types),
    )


def _mount(site: Site) -> None:
    api = MessagesApi(chat_api(site), site.settings)
    site.generate("/v1/messages", api, job=api)
    site.answer("/v1/messages/count_tokens", api.count, form=api.error_form)


def _speaks(path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/") or speaks_anthropic(headers)


def _paths() -> dict[str, Any]:
    error = "AnthropicError"
    count = generation("Count a prompt", "CountRequest", "TokenCount", error=error, streams=False)
    answer = generation("Answer messages with a message", "MessagesRequest", "MessageAnswer", error=error)
    return {"/v1/messages": {"post": answer}, "/v1/messages/count_tokens": {"post": count}}


API = HttpApi(
    mount=_mount,
    paths=_paths,
    types=(MessagesRequest, MessageAnswer, CountRequest, TokenCount, AnthropicError),
    error_form=AnthropicForm(),
    speaks=_speaks,
)
