"""Plans requests of `POST /v1/responses` and counts those of `/v1/responses/input_tokens`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import structlog

from headrace.broker.durable.names import job_id, job_of_run, made_at, new_name
from headrace.broker.durable.stored_job import NewJob
from headrace.broker.errors import ResponseNotStored, ResponseUnknown
from headrace.broker.ingress.response_store import StoredResponse
from headrace.frontend.chat_schema import ChatRequest, JsonSchema, Message, ResponseFormat
from headrace.frontend.errors import BadRequest, ContextTooLong, FrontendError
from headrace.frontend.generation.plan import GenerationPlan, Plan, tenant_of
from headrace.frontend.generation.sse import LogprobWriter
from headrace.frontend.http.bodies import ReportingDecoder, decode_request, missing, unsupported
from headrace.frontend.http.exchange import DisconnectWatch, HttpExchange
from headrace.frontend.metrics import Metrics
from headrace.frontend.openai.chat import ChatAdapter, ChatOptions
from headrace.frontend.ports import ResponsePort
from headrace.frontend.responses.answer import InputTokens, ResponseAnswer, Sampled, opened
from headrace.frontend.responses.conversations import Conversations
from headrace.frontend.responses.items import (
    RESPONSE_PREFIX,
    History,
    MessageBuilder,
    Past,
    kept_past,
    named_items,
    packed_items,
)
from headrace.frontend.responses.items import Item as RequestItem
from headrace.frontend.responses.schema import HINTS, ConversationInput, InputTokensRequest, Items, ResponsesRequest, TextFormat
from headrace.frontend.responses.stored import (
    END,
    PACKING_RATIO,
    EventLog,
    EventReader,
    FinalRecords,
    JobResponseEvents,
    StoredBackground,
)
from headrace.frontend.responses.toolset import Item, Toolset, choice_of, toolset_of
from headrace.frontend.responses.writers import (
    BackgroundEvents,
    Keep,
    ResponseEvents,
    ResponseProgress,
    ResponseView,
    ResponseWriter,
)
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import slug

# Translates a request of the Responses API into a chat request. Sans-io: the caller reads the conversation so far.

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
    instructions: str | None, before: Iterable[RequestItem], items: Items, toolset: Toolset | None = None
) -> list[Message]:
    """Return the messages of a chat. `before` has the items of earlier turns, whose instructions are dropped.

    Raises BadRequest.
    """
    builder = MessageBuilder(toolset)
    if instructions:
        builder.instruct(instructions)
    for item, where in placed(before, items):
        builder.add(item, where)
    if not builder.messages:
        raise BadRequest("input must not be empty", param="input")
    return builder.messages


def placed(before: Iterable[RequestItem], items: Items) -> Iterator[tuple[RequestItem, str]]:
    """Yield the items of earlier turns and those of a request, each with its path for errors."""
    for item in before:
        yield item, "previous_response_id"
    for i, item in enumerate(items):
        yield item, f"input[{i}]"


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


log = structlog.get_logger()

_decoder = ReportingDecoder(ResponsesRequest, HINTS)
_counted = ReportingDecoder(InputTokensRequest, HINTS)


class ResponsesApi:
    """Plans responses. The store keeps those that outlive their request; `store` None = nothing is kept."""

    def __init__(
        self,
        chat: ChatAdapter,
        store: ResponsePort | None,
        settings: FrontendSettings,
        metrics: Metrics,
        background: StoredBackground | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        """`background` None = no response can outlive its connection."""
        self._chat = chat
        self._store = store
        self._metrics = metrics
        self._background = background
        self._conversations = conversations
        self._history = History(store, max_turns=settings.response_max_turns, max_bytes=settings.max_body_bytes)
        self._refuse_hosted = settings.hosted_tools == "refuse"
        self._finals = (
            None if store is None else FinalRecords(store, metrics, max_events=PACKING_RATIO * settings.response_max_bytes)
        )
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode a body and plan its response.

        Raises a FrontendError, an AdmissionError, or a JetStreamError if earlier turns cannot be read.
        """
        request = await decode_request(_decoder, body)
        refuse_unknown(request)
        if exchange.durable and exchange.from_publisher and request.conversation_id is not None:
            what = "in a durable job of a publisher: a later carrier would read later items. Send its items as input"
            raise unsupported("conversation", f"is not supported {what}")
        tenant = tenant_of(exchange)
        past = await self._kept(request, exchange, tenant) or await self._before(request, tenant)
        exchange.asked_bytes += past.size
        items = await self._history.items(request.input, past, tenant)
        chat, toolset = await exchange.aside(partial(self._chat_of, request, past.items, items))
        options = ChatOptions(
            id_prefix=RESPONSE_PREFIX,
            at_most=request.max_output_tokens,
            by_token=bool(chat.logprobs or request.background),
            counts_tools=not (request.background and exchange.durable) or exchange.from_publisher,
        )
        planned = await self._plan(chat, exchange, options)
        sampling = planned.jobs[0].generation.sampling
        own_id = job_of_run(planned.jobs[0].id)
        sampled = Sampled(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
        )
        store = self._store is not None and request.store is not False
        top_logprobs = planned.options.top_logprobs
        logprobs = LogprobWriter(top_logprobs, choices=1) if top_logprobs is not None else None
        turn = _Turn(tenant=tenant, job_id=own_id, items=items, past=past, conversation=request.conversation_id)
        response = opened(request, planned.head, sampled, store=store, background=bool(request.background))
        progress = ResponseProgress(response, own_id, planned.counter, logprobs, toolset.by_offer)
        if request.background and exchange.durable and self._finals is not None:
            record = partial(turn.record, job=exchange.job_token)
            events = JobResponseEvents(progress, self._extender(turn), self._finals, record)
            return planned.answered_by(events, whole=ResponseView(progress))
        if request.background:
            if self._background is None:
                raise unsupported("background", "is not supported here: nothing is stored")
            return _as_job(self._background, body, planned, progress.response, turn, stream=bool(request.stream))
        keep = self._keeper(turn, store=store) if store or turn.conversation is not None else None
        writer = ResponseEvents(progress, keep) if request.stream else ResponseWriter(progress, keep)
        return planned.answered_by(writer, whole=ResponseView(progress) if exchange.durable else None)

    async def count(self, body: bytes, exchange: HttpExchange) -> bytes:
        """Count the tokens of a prompt, also of one that is too long. Raises as `plan`."""
        request = await decode_request(_counted, body)
        refuse_unknown(request)
        tenant = tenant_of(exchange)
        past = await self._before(request, tenant)
        exchange.asked_bytes += past.size
        items = await self._history.items(request.input if request.input is not None else [], past, tenant)
        chat, _ = await exchange.aside(partial(self._chat_of, request, past.items, items))
        chat.truncate_prompt_tokens = None
        try:
            planned = await self._plan(chat, exchange, ChatOptions(id_prefix=RESPONSE_PREFIX, counts_tools=False))
            tokens = planned.jobs[0].prompt_tokens
        except ContextTooLong as error:
            if error.tokens is None:
                raise
            tokens = error.tokens
        return msgspec.json.encode(InputTokens(input_tokens=tokens))

    def _chat_of(
        self, request: ResponsesRequest | InputTokensRequest, before: Sequence[Item], items: Items
    ) -> tuple[ChatRequest, Toolset]:
        toolset = toolset_of(request.tools, placed(before, items), refuse_hosted=self._refuse_hosted)
        messages = messages_of(request.instructions, before, items, toolset)
        return chat_request(request, messages, toolset, go_on=continues(items)), toolset

    async def _before(self, request: ConversationInput, tenant: str) -> Past:
        """Read what was said before a request. Raises a FrontendError, or a JetStreamError if it cannot be read."""
        if (name := request.conversation_id) is None:
            return await self._history.before(request.previous_response_id, tenant)
        if self._conversations is None:
            raise unsupported("conversation", "is not supported here: nothing is stored")
        return await self._conversations.past(tenant, name)

    async def _kept(self, request: ResponsesRequest, exchange: HttpExchange, tenant: str) -> Past | None:
        """Return the conversation as it was when a background response was accepted, None for other requests.

        Every carrier of its job then has the same prompt, although the conversation has gone on. Raises a JetStreamError.
        """
        if not (request.background and exchange.durable and request.conversation_id and self._store is not None):
            return None
        try:
            record = await self._store.get(f"{RESPONSE_PREFIX}{exchange.stored_job}", tenant)
        except ResponseUnknown:
            return None
        return await asyncio.to_thread(kept_past, record)

    async def _plan(self, chat: ChatRequest, exchange: HttpExchange, options: ChatOptions) -> GenerationPlan:
        try:
            return await self._chat.plan_chat(chat, exchange, options)
        except BadRequest as error:
            if error.param is not None and error.param.startswith("messages"):
                error.param = "input"
            raise

    def _keeper(self, turn: _Turn, *, store: bool) -> Keep:
        async def keep(response: ResponseAnswer) -> bool:
            if turn.conversation is not None and not await self._extend(turn, turn.conversation, response):
                response.conversation = None
            return store and await self._keep(turn, response)

        return keep

    def _extender(self, turn: _Turn) -> Keep | None:
        """Return what adds a response in the background to its conversation. That it is stored is not its business."""
        conversation = turn.conversation
        if conversation is None:
            return None

        async def extend(response: ResponseAnswer) -> bool:
            if not await self._extend(turn, conversation, response):
                response.conversation = None
            return response.store

        return extend

    async def _extend(self, turn: _Turn, conversation: str, response: ResponseAnswer) -> bool:
        """Add the turn to its conversation. If that fails, the answer is sent all the same and names no conversation."""
        conversations = self._conversations
        assert conversations is not None  # noqa: S101  # the conversation was read from there
        items = [*msgspec.json.decode(named_items(turn.items, turn.job_id)), *msgspec.to_builtins(response.output)]
        try:
            await conversations.add(turn.tenant, conversation, items, check=False, turn=turn.job_id)
        except (FrontendError, ResponseNotStored, JetStreamError) as error:
            self._metrics.stored.labels(error.reason if isinstance(error, ResponseNotStored) else "not_added").inc()
            log.warning("conversation.not_extended", conversation=conversation, response=response.id, error=str(error))
            return False
        return True

    async def _keep(self, turn: _Turn, response: ResponseAnswer) -> bool:
        stored, store = self._metrics.stored, self._store
        assert store is not None  # noqa: S101  # responses are kept only with a store
        try:
            await store.put(turn.record(response))
        except ResponseNotStored as error:
            # the tokens are computed and paid for, so the answer is sent and says that it was not stored
            stored.labels(error.reason).inc()
            log.warning("response.not_stored", response=response.id, reason=error.reason, error=str(error))
            return False
        stored.labels("stored").inc()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """The input of a response, kept until the response is stored."""

    tenant: str
    job_id: str
    items: Items
    past: Past
    conversation: str | None = None

    def record(self, response: ResponseAnswer, *, job: str = "") -> StoredResponse:
        """Return the record of the response for the store. `job` is the token of the stored job that made it."""
        return StoredResponse(
            id=response.id,
            tenant=self.tenant,
            created=response.created_at,
            answer=msgspec.json.encode(response),
            input=named_items(self.items, self.job_id),
            output=msgspec.json.encode(response.output),
            chain=self.past.chain,
            chain_bytes=self.past.size,
            job=job,
        )

    def accepted(self, response: ResponseAnswer) -> StoredResponse:
        """Return the record of a response that a job will make, with the conversation as it was read."""
        record = self.record(response)
        return msgspec.structs.replace(record, before=packed_items(self.past)) if self.conversation else record


def _as_job(
    background: StoredBackground, body: bytes, planned: GenerationPlan, response: ResponseAnswer, turn: _Turn, *, stream: bool
) -> Plan:
    """Plan a response that any frontend makes, as a stored job. The plan was made to refuse at once what cannot be."""
    request = planned.jobs[0]
    name = new_name(turn.tenant)
    turn = replace(turn, job_id=job_id(turn.tenant, name))
    response.id, response.created_at = f"{RESPONSE_PREFIX}{turn.job_id}", made_at(name, turn.tenant) or response.created_at
    job = NewJob(
        name=name,
        tenant=turn.tenant,
        model_slug=slug(request.card.model),
        endpoint="/v1/responses",
        body=body,
        deadline=time.time() + request.deadline_s,
        request_class="hi" if request.request_class == "hi" else "std",
        durable=True,
    )

    async def detached(exchange: HttpExchange, watch: DisconnectWatch) -> None:
        await background.start(job, await asyncio.to_thread(turn.accepted, response))
        if not stream:
            watch.stop()
            await exchange.send_json(msgspec.json.encode(response))
            return
        await exchange.start_stream()
        events = await background.events(response.id, turn.tenant)
        try:
            await send_log(events, exchange)
        finally:
            await events.close()

    return Plan(
        [], BackgroundEvents(ResponseProgress(response, turn.job_id, planned.counter, None), None), planned.counter, detached
    )


async def send_log(log: EventLog | EventReader, exchange: HttpExchange) -> None:
    """Send the events of a log from the first one to the end."""
    at = 0
    while events := await log.since(at):
        at += events.count(END)
        await exchange.send_events(events)
    await exchange.send_events(b"", more=False)
