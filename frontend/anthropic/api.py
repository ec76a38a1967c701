"""Plans requests of Anthropic's Messages API, counts their tokens, and describes models in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Literal

import msgspec

from headrace.frontend.anthropic.schema import HINTS, AnthropicForm, CountRequest, MessagesRequest, PromptFields, TokenCount
from headrace.frontend.anthropic.translate import chat_request, has_inline_system
from headrace.frontend.anthropic.writers import MessageEvents, MessageWriter
from headrace.frontend.errors import BadRequest, ContextTooLong
from headrace.frontend.generation.plan import GenerationPlan, Plan
from headrace.frontend.generation.sse import StreamWriter, WholeWriter
from headrace.frontend.http.bodies import ReportingDecoder, decode_request
from headrace.frontend.http.exchange import HttpExchange, shown_id
from headrace.frontend.openai.chat import ChatAdapter, ChatOptions
from headrace.frontend.ports import Served
from headrace.frontend.settings import FrontendSettings

REQUEST_ID = b"request-id"  # the header that Anthropic's clients read

_decoder = ReportingDecoder(MessagesRequest, HINTS)
_counted = msgspec.json.Decoder(CountRequest)


class MessagesApi:
    """Plans messages. The headers `x-api-key`, `anthropic-version` and `anthropic-beta` are ignored."""

    def __init__(self, chat: ChatAdapter, settings: FrontendSettings) -> None:
        self._chat = chat
        self._settings = settings
        self.error_form = AnthropicForm()

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        _add_request_id(exchange)
        request = await decode_request(_decoder, body)
        plan = await self._plan(request, exchange, at_most=request.max_tokens)
        writer: StreamWriter | WholeWriter
        if request.stream:
            writer = MessageEvents(plan.head, plan.counter, self.error_form, short=plan.short)
        else:
            writer = MessageWriter(plan.head, plan.counter, short=plan.short)
        return plan.answered_by(writer)

    async def count(self, body: bytes, exchange: HttpExchange) -> bytes:
        """Count the tokens of a prompt, also of one that is too long. Raises as `plan`."""
        _add_request_id(exchange)
        request = await decode_request(_counted, body)
        try:
            tokens = (await self._plan(request, exchange)).jobs[0].prompt_tokens
        except ContextTooLong as error:
            if error.tokens is None:
                raise
            tokens = error.tokens
        return msgspec.json.encode(TokenCount(input_tokens=tokens))

    async def _plan(self, request: PromptFields, exchange: HttpExchange, *, at_most: int | None = None) -> GenerationPlan:
        strip = self._settings.strip_billing_header
        options = ChatOptions(id_prefix="msg_", at_most=at_most)
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
    context_management: Support
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
        context_management=no,
        effort=EffortSupport(supported=reasons, low=level, medium=level, high=level, xhigh=level, max=level),
        image_input=Support(supported="image" in card.media),
        pdf_input=no,
        server_tools=ServerToolSupport(supported=False, web_search=no, code_execution=no),
        structured_outputs=chat,
        thinking=ThinkingSupport(supported=reasons, types=types),
    )
