"""Plans requests of `POST /v1/chat/completions`: messages become a prompt, and the prompt a job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import structlog

from headrace.broker.messages import Parsing
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import GenerationOptions, GenerationPlan, Plan, plan_generation
from headrace.frontend.generation.request_checks import check_choices, refuse_unsupported
from headrace.frontend.generation.tenant import tenant_of
from headrace.frontend.generation.tools import calls_in, toolbox_of
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.http.http_exchange import HttpExchange, log_ids
from headrace.frontend.media.loader import MediaItem, MediaLoader
from headrace.frontend.media.parts import Contents, find_media, has_media, with_parts
from headrace.frontend.metrics import Metrics
from headrace.frontend.openai.answer_writer import answer_writer, whole_writer
from headrace.frontend.openai.chat_adapter import ChatOptions
from headrace.frontend.openai.chat_messages import named_roles, plain_messages
from headrace.frontend.openai.stored_chats import StoredChats
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit
from headrace.frontend.schema.chat import ChatRequest
from headrace.frontend.schema.stored import ChatRecord
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.writers.base import StreamWriter, WholeWriter
from headrace.frontend.writers.sse import CHAT_EVENTS
from headrace.frontend.writers.stored_answer import StoringStream, StoringWhole

log = structlog.get_logger()

NOT_OFFERED = b"headrace-tools-not-offered"

_decoder = msgspec.json.Decoder(ChatRequest)


class ChatApi:
    """Plans chat requests. It keeps no state but the cache of loaded models. `stored` None = no completion is stored."""

    def __init__(
        self, model_cache: ModelCache, settings: FrontendSettings, metrics: Metrics, stored: StoredChats | None = None
    ) -> None:
        self._model_cache = model_cache
        self._metrics = metrics
        self._settings = settings
        self._stored = stored
        self._media = MediaLoader(settings)
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
        request = await decode_request(_decoder, body)
        plan = await self.plan_chat(request, exchange, ChatOptions(id_prefix="chatcmpl-"))
        echo = _echo(request, plan.options.role)
        writer = answer_writer(request, plan, CHAT_EVENTS, echo=echo)
        if request.store and self._stored is not None:
            writer = self._storing(request, plan, writer, echo, tenant_of(exchange))
        whole = whole_writer(request, plan, CHAT_EVENTS, echo=echo) if exchange.durable else None
        return plan.answered_by(writer, whole=whole)

    def _storing(
        self,
        request: ChatRequest,
        plan: GenerationPlan,
        writer: StreamWriter | WholeWriter,
        echo: list[str],
        tenant: str,
    ) -> StreamWriter | WholeWriter:
        """Return the writer that also stores the answer."""
        stored, head = self._stored, plan.head
        assert stored is not None  # noqa: S101  # the caller asked
        record = ChatRecord(id=head.id, created=head.created, model=head.model, metadata=request.metadata or {})

        async def keep(answer: bytes) -> None:
            await stored.keep(tenant, record, answer, request.messages)

        if isinstance(writer, WholeWriter):
            return StoringWhole(writer, keep)
        return StoringStream(writer, whole_writer(request, plan, CHAT_EVENTS, echo=echo), keep)

    async def plan_chat(self, request: ChatRequest, exchange: HttpExchange, options: ChatOptions) -> GenerationPlan:
        """Plan the jobs that answer a conversation. The Responses and Messages APIs come here as well.

        Raises a FrontendError or an AdmissionError.
        """
        _refuse(request)
        check_choices(request.n or 1, 1, self._settings)
        model = await self._model_cache.get(request.model)
        model.check_kind("chat")
        if model.template is None:
            message = f"{model.card.model!r} has no chat template; use /v1/completions"
            raise BadRequest(message, param="model", code="no_chat_template")
        refuse_hosted = self._settings.hosted_tools == "refuse"
        toolbox = await exchange.aside(partial(toolbox_of, request, model.card, refuse_hosted=refuse_hosted))
        takes_parts = model.template.takes_parts(tools=bool(toolbox.tools))
        given = request.messages
        items: list[MediaItem] = []
        contents: Contents = {}
        if has_media(given):
            finding = partial(find_media, given, model.card, most=self._settings.media_max_items)
            given, found = await exchange.aside(finding)
            items = await self._media.load(found.parts)
            contents = found.contents if takes_parts else {}
        messages = await exchange.aside(partial(plain_messages, given, parts=takes_parts))
        continue_final = bool(request.continue_final_message)
        template_kwargs = _template_kwargs(request)
        wanted = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        limit = LengthLimit(
            context_length=model.card.context_length, wanted=wanted, truncate=request.truncate_prompt_tokens, param="messages"
        )
        for each in messages:  # a template copies its input several times
            if isinstance(content := each.get("content"), str):
                await model.encoder.check_length(content, limit)
        text = await model.render(
            with_parts(named_roles(messages, model.template), contents),
            add_generation_prompt=request.add_generation_prompt is not False and not continue_final,
            continue_final_message=continue_final,
            tools=toolbox.tools or None,
            documents=request.documents,
            extra=template_kwargs,
        )
        prompt = await model.encoder.encode(
            text,
            add_special_tokens=bool(request.add_special_tokens),
            limit=limit,
            salt=exchange.salt(request.cache_salt),
            media=items,
        )
        parse = None
        if toolbox.wanted or model.card.reasoning_parser is not None:
            parse = Parsing(
                tools=toolbox.tools,
                choice=toolbox.choice,
                parallel=request.parallel_tool_calls is not False,
                reasoning=request.include_reasoning is not False,
                whole=not request.stream and not options.by_token,
                template_kwargs={**model.card.template_kwargs, **template_kwargs},
                calls_before=calls_in(messages),
            )
        generation = GenerationOptions(
            id_prefix=options.id_prefix,
            prompts=[prompt],
            wanted=wanted,
            at_most=options.at_most,
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=_prompt_logprobs(request),
            prompt_text=text if request.return_prompt_text else None,
            parse=parse,
            freeform=toolbox.freeform,
            role="assistant" if request.add_generation_prompt is not False else messages[-1]["role"],
        )
        plan = plan_generation(request, exchange, model, self._settings, generation)
        if toolbox.not_offered:
            self._report(toolbox.not_offered, exchange)
        return plan

    def _report(self, not_offered: Sequence[str], exchange: HttpExchange) -> None:
        """Report the types of tools that nothing here runs, so that the model was not shown them."""
        exchange.more_headers.append((NOT_OFFERED, ", ".join(not_offered).encode()))
        for kind in not_offered:
            self._metrics.not_offered.labels(kind).inc()
        log.info("tools.not_offered", types=not_offered, **log_ids(exchange.scope))


def _template_kwargs(request: ChatRequest) -> dict[str, Any]:
    """Return the client's arguments for the template. As in vLLM's server, the effort turns thinking on and off."""
    kwargs = dict(request.chat_template_kwargs or {})
    if (effort := request.reasoning_effort) is not None:
        kwargs.setdefault("enable_thinking", effort != "none")
        kwargs["reasoning_effort"] = effort
    return kwargs


def _prompt_logprobs(request: ChatRequest) -> int | None:
    """Return the number of alternatives per prompt token. As in vLLM's server, `echo` includes them."""
    if request.prompt_logprobs is None and request.echo and not request.stream:
        return request.top_logprobs or 0
    return request.prompt_logprobs


def _echo(request: ChatRequest, role: str) -> list[str]:
    """Return the last message's text if the answer continues it."""
    if not request.echo or has_media(request.messages[-1:]):
        return []
    last = plain_messages(request.messages[-1:])[0]
    return [last["content"]] if last["role"] == role and last["content"] else []


def _refuse(request: ChatRequest) -> None:
    refuse_unsupported(request)
    if request.functions is not None:
        raise unsupported("functions", "is not supported here: use tools")
    if request.function_call is not None:
        raise unsupported("function_call", "is not supported here: use tool_choice")
    if request.chat_template is not None:
        raise unsupported("chat_template", "cannot be sent with a request; the model brings its own")
    if request.audio is not None:
        raise unsupported("audio")
    if request.web_search_options is not None:
        raise unsupported("web_search_options")
    if request.modalities and request.modalities != ["text"]:
        raise unsupported("modalities", 'other than ["text"] are not supported here')
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.add_generation_prompt and request.continue_final_message:
        raise BadRequest("continue_final_message cannot be combined with add_generation_prompt", param="continue_final_message")
