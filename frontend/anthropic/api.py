"""Plans requests of `POST /v1/messages` and counts those of `/v1/messages/count_tokens`: blocks, messages, job."""

from __future__ import annotations

from functools import partial

import msgspec

from headrace.frontend.anthropic.errors import AnthropicForm
from headrace.frontend.anthropic.schema import CountRequest, MessagesRequest, PromptFields, TokenCount
from headrace.frontend.anthropic.translate import chat_request, has_inline_system
from headrace.frontend.anthropic.writers import MessageEvents, MessageWriter
from headrace.frontend.errors import BadRequest, ContextTooLong
from headrace.frontend.generation.plan import GenerationPlan, Plan
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.http_exchange import HttpExchange, shown_id
from headrace.frontend.openai.chat_adapter import ChatAdapter, ChatOptions
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.writers.base import StreamWriter, WholeWriter

REQUEST_ID = b"request-id"  # the header that Anthropic's clients read

_decoder = msgspec.json.Decoder(MessagesRequest)
_counted = msgspec.json.Decoder(CountRequest)


class MessagesApi:
    """Plans messages. The headers `x-api-key`, `anthropic-version` and `anthropic-beta` are ignored."""

    def __init__(self, chat: ChatAdapter, settings: FrontendSettings) -> None:
        self._chat = chat
        self._settings = settings
        self.error_form = AnthropicForm()

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
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
