"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: blocks → messages → job."""

from __future__ import annotations

from functools import partial

import msgspec

from headrace.frontend.anthropic.errors import AnthropicForm
from headrace.frontend.anthropic.schema import Conversation, CountRequest, MessagesRequest, TokenCount
from headrace.frontend.anthropic.translate import chat_request, has_inline_system
from headrace.frontend.anthropic.writers import MessageEvents, MessageWriter
from headrace.frontend.errors import BadRequest, ContextTooLong
from headrace.frontend.generation.plan import Draft, Plan
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.openai.chat_adapter import ChatAdapter, bounded
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.writers.base import StreamWriter, WholeWriter

REQUEST_ID = b"request-id"  # where Anthropic's clients look for it

_decoder = msgspec.json.Decoder(MessagesRequest)
_counted = msgspec.json.Decoder(CountRequest)


class MessagesApi:
    """Plans messages. `x-api-key`, `anthropic-version` and `anthropic-beta` are taken and mean nothing here."""

    def __init__(self, chat: ChatAdapter, settings: FrontendSettings) -> None:
        self._chat = chat
        self._settings = settings
        self.error_form = AnthropicForm()

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Raises a FrontendError or an AdmissionError."""
        _name(exchange)
        request = await decode_request(_decoder, body)
        draft, short = bounded(await self._draft(request, exchange), request.max_tokens)
        writer: StreamWriter | WholeWriter
        if request.stream:
            writer = MessageEvents(draft.head, draft.tally, self.error_form, short=short)
        else:
            writer = MessageWriter(draft.head, draft.tally, short=short)
        return Plan(draft.jobs, writer, draft.tally)

    async def count(self, body: bytes, exchange: HttpExchange) -> bytes:
        """The tokens of a prompt, also of one that is too long. Raises as `plan`."""
        _name(exchange)
        request = await decode_request(_counted, body)
        try:
            tokens = (await self._draft(request, exchange)).jobs[0].prompt_tokens
        except ContextTooLong as error:
            if error.tokens is None:
                raise
            tokens = error.tokens
        return msgspec.json.encode(TokenCount(input_tokens=tokens))

    async def _draft(self, request: Conversation, exchange: HttpExchange) -> Draft:
        strip = self._settings.strip_billing_header
        try:
            chat = await exchange.aside(partial(chat_request, request, strip_billing=strip))
            draft, _ = await self._chat.draft(chat, exchange, id_prefix="msg_")
        except BadRequest as error:
            if error.param == "stop":
                error.param = "stop_sequences"
            if error.code != "template_error" or not has_inline_system(request):
                raise
            # the template takes system messages at the beginning only
            merged = await exchange.aside(partial(chat_request, request, strip_billing=strip, merge_system=True))
            draft, _ = await self._chat.draft(merged, exchange, id_prefix="msg_")
        return draft


def _name(exchange: HttpExchange) -> None:
    exchange.more_headers.append((REQUEST_ID, str(exchange.scope["headrace.request_id"]).encode()))
