"""Plans requests of `POST /v1/chat/completions`: messages become a prompt, and the prompt a job. Other APIs reuse it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import msgspec
import structlog

from headrace.broker.codec import unpack_u32
from headrace.broker.messages.requests import Parsing
from headrace.frontend.answer_schema import ChatRecord
from headrace.frontend.chat_schema import DEFAULT_MAX_TOKENS, HINTS, ChatRequest, CompletionRequest, GenerationRequest, Message
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.content_blocks import INPUT, ParsedWriter
from headrace.frontend.generation.plan import GenerationOptions, GenerationPlan, Plan, plan_generation, tenant_of
from headrace.frontend.generation.request_checks import NO_TOOLS, calls_in, check_choices, refuse_unsupported, toolbox_of
from headrace.frontend.generation.sse import (
    CHAT_EVENTS,
    COMPLETION_EVENTS,
    AnswerOptions,
    EventForm,
    EventWriter,
    LogprobWriter,
    StreamWriter,
    WholeWriter,
)
from headrace.frontend.generation.unary import EchoWriter, StoringStream, StoringWhole, UnaryWriter
from headrace.frontend.http.bodies import ReportingDecoder, decode_request, kinds_of, missing, unsupported
from headrace.frontend.http.exchange import HttpExchange, log_ids
from headrace.frontend.metrics import Metrics
from headrace.frontend.openai.stored_chats import StoredChats
from headrace.frontend.prompts import model_cache as prompt_embeds
from headrace.frontend.prompts.media import MediaItem, MediaLoader
from headrace.frontend.prompts.media_parts import Contents, find_media, has_media, with_parts
from headrace.frontend.prompts.model_cache import LoadedModel, ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit, Prompt
from headrace.frontend.prompts.templates import ChatTemplate
from headrace.frontend.prompts.text_encoder import PIECE
from headrace.frontend.settings import FrontendSettings


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that an API sets for a conversation and that no chat request has."""

    id_prefix: str
    at_most: int | None = None  # tokens per choice; unlike `max_tokens` it may exceed the room that the context leaves
    by_token: bool = False  # parse the answer token by token even if it is not streamed, to know which token has which text
    counts_tools: bool = True  # False: tools that are not offered count elsewhere, or nothing is made


class ChatAdapter(Protocol):
    """`headrace.frontend.openai.chat.ChatApi`, as APIs that speak in messages see it."""

    def plan_chat(self, request: ChatRequest, exchange: HttpExchange, options: ChatOptions) -> Awaitable[GenerationPlan]:
        """Plan the jobs that answer a conversation. Raises a FrontendError or an AdmissionError."""


# Converts the messages of a chat request into the form that chat templates expect.
#
# The rules are those of vLLM's server, so that the same request gives the same prompt: text parts are joined by newlines,
# arguments of past tool calls become objects, and reasoning is given under both of its names.

log = structlog.get_logger()

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Type of a text part → the key of its text."""


def plain_messages(messages: Sequence[Message], *, parts: bool = False) -> list[dict[str, Any]]:
    """Convert messages; with `parts` their contents become lists of parts. Raises BadRequest with the path of the field."""
    return [_plain(message, f"messages[{i}]", parts) for i, message in enumerate(messages)]


def _plain(message: Message, where: str, parts: bool) -> dict[str, Any]:
    role = message["role"]
    content = message.get("content")
    if content is None and role != "assistant":  # an assistant message may consist of tool calls alone
        raise missing(f"{where}.content")
    texts = [content] if isinstance(content, str) else _texts(content or (), where)
    plain: dict[str, Any] = {"role": role}
    if parts and role != "tool":
        plain["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        plain["content"] = texts[0] if len(texts) == 1 else "\n".join(texts)
    if role == "assistant":
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [_past_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(calls)]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            plain["reasoning"] = plain["reasoning_content"] = reasoning
    elif role == "tool" and (call_id := message.get("tool_call_id")) is not None:
        plain["tool_call_id"] = call_id
    if (name := message.get("name")) is not None:
        plain["name"] = name
    return plain


def _texts(parts: Sequence[Mapping[str, Any]], where: str) -> list[str]:
    return [_text(part, f"{where}.content[{j}]") for j, part in enumerate(parts)]


def _text(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind is None:
        raise missing(f"{where}.type")
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise unsupported(f"{where}.type", f"{str(kind)[:100]!r} is not supported here: text parts only")
    text = part.get(key, part.get("text"))
    if text is None:
        raise missing(f"{where}.{key}")
    if not isinstance(text, str):
        raise BadRequest(f"invalid value for {where}.{key}: expected a string", param=f"{where}.{key}")
    return text


def _past_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a past call as templates know it: that of a freeform tool becomes the call of the function that stands for it."""
    function: Mapping[str, Any] | None = call.get("function")
    if call.get("type") == "custom":
        custom = call.get("custom")
        if custom is None:
            raise missing(f"{where}.custom")
        function = {"name": custom["name"], "arguments": {INPUT: custom.get("input") or ""}}
        call = {key: value for key, value in call.items() if key != "custom"} | {"type": "function"}
    if function is None:
        raise missing(f"{where}.function")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), where)}}


def _arguments(arguments: str | Mapping[str, Any] | None, where: str) -> Mapping[str, Any]:
    """Parse the arguments of a past call. Invalid ones become {}, because an error would end the conversation for good."""
    if not arguments:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    log.warning("tool_call.arguments_dropped", where=where, characters=len(arguments))
    return {}


# -- roles ---------------------------------------------------------------------------------------------------


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's API. Some models have more, which their templates name."""

_KNOWN_ROLES = frozenset(ROLES)


def named_roles(messages: list[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Check the roles, and rename `developer` to `system` for templates that know only the older name.

    Raises BadRequest for a role that neither OpenAI's API nor the template has: most templates would take any word for a role.
    """
    roles = {message["role"] for message in messages}
    new = roles - _KNOWN_ROLES
    if new and (unknown := {role for role in new if not template.knows_role(role)}):
        i, role = next((i, message["role"]) for i, message in enumerate(messages) if message["role"] in unknown)
        param = f"messages[{i}].role"
        raise BadRequest(f"invalid value for {param}: {role!r}. Supported are: {', '.join(ROLES)}", param=param)
    if "developer" not in roles or template.knows_role("developer"):
        return messages
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


T = TypeVar("T")


def whole_writer(request: GenerationRequest, plan: GenerationPlan, form: EventForm, *, echo: Sequence[str] = ()) -> WholeWriter:
    """Return a writer of the whole answer beside that of its stream. Both take the same rows, so it has its own counter."""
    alone = msgspec.structs.replace(plan, counter=plan.counter.fresh())
    whole = answer_writer(msgspec.structs.replace(request, stream=False), alone, form, echo=echo)
    assert isinstance(whole, WholeWriter)  # noqa: S101  # it is not streamed
    return whole


def answer_writer(
    request: GenerationRequest, plan: GenerationPlan, form: EventForm, *, echo: Sequence[str] = ()
) -> StreamWriter | WholeWriter:
    """Return the writer of the answer. `echo` has one text per prompt, or is empty."""
    n, total, asked = request.n or 1, plan.choices, plan.options
    logprobs, token_ids = None, bool(request.return_token_ids)
    if asked.top_logprobs is not None:
        logprobs = LogprobWriter(asked.top_logprobs, choices=total, as_ids=bool(request.return_tokens_as_token_ids))
    if asked.parse is not None and not asked.parse.reasoning:  # tokens would reveal the reasoning that is to be left out
        logprobs, token_ids = None, False
    prompt_ids = [unpack_u32(p.packed) for p in asked.prompts] if request.return_token_ids else []
    echo_first: list[tuple[int, str]] = []
    if echo and logprobs is not None and not form.chat:
        first_ids = [unpack_u32(p.packed[:4]) for p in asked.prompts]
        echo_first = [(ids[0], plan.model.encoder.decode(ids)) for ids in first_ids]
    stream_options = request.stream_options
    usage = bool(stream_options and stream_options.include_usage)
    options = AnswerOptions(
        usage=usage,
        usage_always=bool(usage and stream_options and stream_options.continuous_usage_stats),
        token_ids=token_ids,
        logprobs=logprobs,
        role=asked.role,
        parse=asked.parse,
        freeform=asked.freeform,
        echo=_per_choice(echo, n) if echo else (),
        echo_first=_per_choice(echo_first, n) if echo_first else (),
        prompt_ids=_per_choice(prompt_ids, n) if prompt_ids else (),
        prompt_text=asked.prompt_text,
        prompt_logprobs=asked.prompt_logprobs is not None,
        silent=asked.silent,
    )
    if not request.stream:
        return UnaryWriter(plan.head, plan.counter, choices=total, chat=form.chat, options=options)
    kind = ParsedWriter if asked.parse is not None else EchoWriter if echo_first or asked.silent else EventWriter
    return kind(form, plan.head, plan.counter, choices=total, options=options)


def _per_choice(values: Sequence[T], choices: int) -> list[T]:
    """Repeat each prompt's value for its choices."""
    return [value for value in values for _ in range(choices)]


NOT_OFFERED = b"headrace-tools-not-offered"

_decoder = ReportingDecoder(ChatRequest, HINTS)


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
        toolbox = NO_TOOLS
        if request.tools is not None or request.tool_choice is not None:
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
        if exchange.asked_bytes > PIECE:  # in a shorter request nothing is
            for each in messages:  # a template copies its input several times
                if isinstance(content := each.get("content"), str):
                    await model.encoder.check_length(content, limit)
        text = await model.render(
            with_parts(named_roles(messages, model.template), contents),
            size=exchange.asked_bytes,
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
            header = (NOT_OFFERED, ", ".join(toolbox.not_offered).encode())
            if header not in exchange.more_headers:  # a conversation may be planned again with edits
                exchange.more_headers.append(header)
            if options.counts_tools:
                self._report(toolbox.not_offered, exchange)
        return plan

    def _report(self, not_offered: Sequence[str], exchange: HttpExchange) -> None:
        """Report the types of tools that nothing here runs, so that the model was not shown them."""
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


# Plans requests of `POST /v1/completions`: every prompt, a text or ids, becomes a job.

_completion_decoder = ReportingDecoder(CompletionRequest, HINTS)


class CompletionApi:
    """Plans completions requests. It keeps no state but the cache of loaded models."""

    def __init__(self, model_cache: ModelCache, settings: FrontendSettings) -> None:
        self._model_cache = model_cache
        self._settings = settings
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_completion_decoder, body)
        _refuse_completion(request)
        prompts, given = await list_prompts(request), prompt_embeds.listed(request)
        check_choices(request.n or 1, len(prompts) + len(given), self._settings)
        model = await self._model_cache.get(request.model)
        model.check_kind("completion")
        silent = request.max_tokens == 0  # an answer of the prompt alone; as in vLLM, one token is computed and dropped
        wanted = 1 if silent else DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        limit = LengthLimit(
            context_length=model.card.context_length, wanted=wanted, truncate=request.truncate_prompt_tokens, param="prompt"
        )
        encoded = [await prompt_embeds.prompt_of(text, model, limit, self._settings) for text in given]
        salt = exchange.salt(request.cache_salt)
        encoded += [await self._encode(prompt, request, model, limit, salt) for prompt in prompts]
        echo = []
        if request.echo:
            echo = [p if isinstance(p, str) else await model.encoder.text_of(e) for p, e in zip(prompts, encoded, strict=True)]
        options = GenerationOptions(
            id_prefix="cmpl-",
            prompts=encoded,
            wanted=wanted,
            top_logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs if not request.echo else _first(request.prompt_logprobs, request.logprobs),
            silent=silent,
        )
        plan = plan_generation(request, exchange, model, self._settings, options)
        writer = answer_writer(request, plan, COMPLETION_EVENTS, echo=echo)
        whole = whole_writer(request, plan, COMPLETION_EVENTS, echo=echo) if exchange.durable else None
        return plan.answered_by(writer, whole=whole)

    async def _encode(
        self, prompt: str | list[int], request: CompletionRequest, model: LoadedModel, limit: LengthLimit, salt: str | None
    ) -> Prompt:
        if isinstance(prompt, str):
            special = request.add_special_tokens is not False
            return await model.encoder.encode(prompt, add_special_tokens=special, limit=limit, salt=salt)
        return await model.encoder.take_ids(prompt, limit=limit, salt=salt)


def _refuse_completion(request: CompletionRequest) -> None:
    refuse_unsupported(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "is not supported here: ask for n choices and take the best")
    if request.suffix:
        raise unsupported("suffix")
    if request.max_tokens == 0 and not request.echo:
        raise BadRequest("max_tokens must be at least 1 without echo", param="max_tokens")


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


async def list_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """Return a prompt in any of its four forms as a list of texts or ids. Raises BadRequest for a mixture."""
    prompt = request.prompt
    if not prompt and request.prompt_embeds:
        return []
    if prompt is None:
        raise missing("prompt")
    if isinstance(prompt, str):
        return [prompt]
    kinds = await kinds_of(prompt)
    if len(kinds) > 1:
        raise BadRequest("prompt must be a text, a list of texts, a list of ids or a list of lists of ids", param="prompt")
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    return cast("list[str | list[int]]", prompt)
