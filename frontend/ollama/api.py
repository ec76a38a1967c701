"""Ollama's API: plans chats, prompts and embeddings, and describes the served models."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.broker.errors import UnknownModel
from headrace.frontend.apis import HttpApi, Site
from headrace.frontend.auth.caller import check_model, covered
from headrace.frontend.chat_schema import ChatRequest, GenerationRequest, JsonSchema, Message, ResponseFormat
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.plan import GenerationOptions, GenerationPlan, Plan, plan_generation
from headrace.frontend.generation.request_checks import hosted_type
from headrace.frontend.generation.sse import UsageCounter
from headrace.frontend.http.bodies import ReportingDecoder, decode_request, unsupported
from headrace.frontend.http.exchange import DisconnectWatch, HttpExchange
from headrace.frontend.ollama.schema import (
    PREFIX,
    SCHEMAS,
    KeepAlive,
    OllamaChatRequest,
    OllamaDetails,
    OllamaEmbedAnswer,
    OllamaEmbedRequest,
    OllamaForm,
    OllamaMessage,
    OllamaModel,
    OllamaModels,
    OllamaOptions,
    OllamaPromptRequest,
    OllamaRequest,
    OllamaShown,
    OllamaShowRequest,
    OllamaVectorAnswer,
    OllamaVectorRequest,
    OllamaVersion,
)
from headrace.frontend.ollama.writers import (
    NDJSON,
    AnswerRecord,
    AnswerShape,
    ChatShape,
    OllamaLines,
    OllamaWriter,
    PromptShape,
)
from headrace.frontend.openai.api import chat_api
from headrace.frontend.openai.chat import ChatAdapter, ChatOptions
from headrace.frontend.openapi import generation, json_answer, operation
from headrace.frontend.pooling.api import EmbeddingApi
from headrace.frontend.pooling.schema import EmbeddingRequest
from headrace.frontend.pooling.writers import VectorAnswer, VectorWriter, floats
from headrace.frontend.ports import Models, Served
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit
from headrace.frontend.settings import FrontendSettings

# Translates requests of Ollama's API into chat requests. Sans-io.

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
    """Refuse options that would otherwise be ignored silently. Raises BadRequest."""
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


ID_PREFIX = "ollama-"
LATEST = ":latest"  # the tag that Ollama's clients add to names without one

_chat = ReportingDecoder(OllamaChatRequest)
_prompt = ReportingDecoder(OllamaPromptRequest)
_embed = ReportingDecoder(OllamaEmbedRequest)
_vector = ReportingDecoder(OllamaVectorRequest)


def known_name(name: str, models: Models) -> str:
    """Return the name under which a model is served: this one, or without the tag. Raises UnknownModel."""
    try:
        models.get(name)
    except UnknownModel:
        bare = name.removesuffix(LATEST)
        if not bare or bare == name:
            raise
        models.get(bare)
        return bare
    return name


class OllamaChatApi:
    def __init__(self, chat: ChatAdapter, models: Models) -> None:
        self._chat = chat
        self._models = models
        self.error_form = OllamaForm()

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_chat, body)
        name = known_name(request.model, self._models)
        shape = ChatShape(request.model)
        if not request.messages:
            return _loaded(shape, request.keep_alive)
        chat = await exchange.aside(partial(chat_of, request, name))
        return _answered(await _plan_chat(self._chat, chat, exchange), request, shape, exchange)


class OllamaPromptApi:
    """Plans prompts: in the model's template or, with `raw`, as they are."""

    def __init__(self, chat: ChatAdapter, model_cache: ModelCache, models: Models, settings: FrontendSettings) -> None:
        self._chat = chat
        self._model_cache = model_cache
        self._models = models
        self._settings = settings
        self.error_form = OllamaForm()

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_prompt, body)
        name = known_name(request.model, self._models)
        shape = PromptShape(request.model)
        if not request.prompt and not request.images:
            return _loaded(shape, request.keep_alive)
        if request.raw:
            plan = await self._plan_raw(request, name, exchange)
        else:
            chat = await exchange.aside(partial(chat_of_prompt, request, name))
            plan = await _plan_chat(self._chat, chat, exchange)
        return _answered(plan, request, shape, exchange)

    async def _plan_raw(self, request: OllamaPromptRequest, name: str, exchange: HttpExchange) -> GenerationPlan:
        generation = raw_generation_of(request, name)
        model = await self._model_cache.get(name)
        model.check_kind("completion")
        limit = LengthLimit(context_length=model.card.context_length, wanted=None, truncate=None, param="prompt")
        prompt = await model.encoder.encode(request.prompt or "", add_special_tokens=True, limit=limit)
        options = GenerationOptions(
            id_prefix=ID_PREFIX,
            prompts=[prompt],
            wanted=None,
            at_most=generation.max_tokens,
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        return plan_generation(generation, exchange, model, self._settings, options)


async def _plan_chat(adapter: ChatAdapter, chat: ChatRequest, exchange: HttpExchange) -> GenerationPlan:
    """Plan a chat. As in Ollama, more tokens than the context has room for are no error."""
    most, chat.max_tokens = chat.max_tokens, None
    return await adapter.plan_chat(chat, exchange, ChatOptions(id_prefix=ID_PREFIX, at_most=most))


def _answered(plan: GenerationPlan, request: OllamaRequest, shape: AnswerShape, exchange: HttpExchange) -> Plan:
    record = AnswerRecord(plan.counter, logprobs=plan.options.top_logprobs)
    if request.stream is False:
        return plan.answered_by(OllamaWriter(shape, record))
    exchange.stream_headers = NDJSON
    return plan.answered_by(OllamaLines(shape, record))


def _loaded(shape: AnswerShape, keep_alive: KeepAlive) -> Plan:
    """Answer a request that only loads or unloads a model. Models stay loaded here whatever it says."""
    reason = "unload" if keep_alive in (0, "0") else "load"
    body = msgspec.json.encode(shape.record("", "", (), done_reason=reason))

    async def answer(exchange: HttpExchange, watch: DisconnectWatch) -> None:
        watch.stop()
        await exchange.send_json(body)

    counter = UsageCounter([], 1)
    return Plan([], OllamaWriter(shape, AnswerRecord(counter)), counter, answer)


class OllamaEmbedApi:
    def __init__(self, embeddings: EmbeddingApi, models: Models) -> None:
        self._embeddings = embeddings
        self._models = models
        self.error_form = OllamaForm()

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_embed, body)
        vectors = EmbeddingRequest(
            model=known_name(request.model, self._models),
            input=request.input if isinstance(request.input, str) else list(request.input),
            dimensions=request.dimensions,
            truncate_prompt_tokens=None if request.truncate is False else -1,
        )
        jobs, answer = await self._embeddings.plan_vectors(vectors, exchange)
        return Plan(jobs, OllamaVectors(answer, request.model), answer.counter)


class OllamaVectorApi:
    """Plans the embedding of one text in the older form, which has no counts."""

    def __init__(self, embeddings: EmbeddingApi, models: Models) -> None:
        self._embeddings = embeddings
        self._models = models
        self.error_form = OllamaForm()

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_vector, body)
        name = known_name(request.model, self._models)
        vectors = EmbeddingRequest(model=name, input=request.prompt, truncate_prompt_tokens=-1)
        jobs, answer = await self._embeddings.plan_vectors(vectors, exchange)
        return Plan(jobs, OllamaVectors(answer, None), answer.counter)


class OllamaVectors(VectorWriter):
    """Writes vectors with their counts or, without `model`, the first one alone."""

    def __init__(self, answer: VectorAnswer, model: str | None) -> None:
        super().__init__(answer)
        self._model = model
        self._counter = answer.counter
        self._began = time.perf_counter_ns()

    def make(self) -> bytes:
        if self._model is None:
            return msgspec.json.encode(OllamaVectorAnswer(embedding=list(floats(self.vectors[0]))))
        answer = OllamaEmbedAnswer(
            model=self._model,
            embeddings=[],
            total_duration=time.perf_counter_ns() - self._began,
            load_duration=0,
            prompt_eval_count=self._counter.prompt,
        )
        # one vector at a time: the encoder does not release the interpreter
        rows = b",".join(msgspec.json.encode(floats(vector)) for vector in self.vectors)
        return msgspec.json.encode(answer).replace(b'"embeddings":[]', b'"embeddings":[' + rows + b"]", 1)


# Answers the routes of Ollama's API that describe models and the server, without a worker.

SPOKEN = "0.12.11"  # the version of Ollama whose API this is; clients compare it with the least that they need
FOREVER = "9999-12-31T23:59:59Z"
TEMPLATE = "chat_template.jinja"

_show = ReportingDecoder(OllamaShowRequest)


class OllamaModelRoutes:
    """The endpoints of `/api/tags`, `/api/ps`, `/api/version` and `/api/show`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        """Return the Starlette routes; `show` is served as a route with a body."""
        return [Route("/api/tags", self.tags), Route("/api/ps", self.ps), Route("/api/version", self.version)]

    async def tags(self, request: Request) -> Response:
        """List the models and adapters that have a ready worker."""
        return _json(OllamaModels(models=[_entry(served) for served in covered(request.scope, self._ready())]))

    async def ps(self, request: Request) -> Response:
        """List them as loaded, which they stay."""
        entries = []
        for served in covered(request.scope, self._ready()):
            entry = _entry(served)
            entry.expires_at, entry.size_vram, entry.context_length = FOREVER, 0, served.card.context_length
            entries.append(entry)
        return _json(OllamaModels(models=entries))

    async def version(self, request: Request) -> Response:
        return _json(OllamaVersion(version=SPOKEN, headrace=metadata.version("headrace")))

    async def show(self, body: bytes, exchange: HttpExchange) -> bytes:
        """Describe a model. Raises BadRequest, UnknownModel."""
        request = await decode_request(_show, body)
        name = request.model or request.name
        if not name:
            raise BadRequest("missing required parameter: model", param="model", code="missing_required_parameter")
        served = self._models.get(known_name(name, self._models))
        check_model(exchange.scope, served.adapter or served.card.model)
        card = served.card
        shown = OllamaShown(
            modified_at=_time(served),
            template=served.files.get(TEMPLATE, b"").decode("utf-8", "replace"),
            details=OllamaDetails(parent_model=card.model if served.adapter else ""),
            model_info={
                "general.architecture": "headrace",
                "general.basename": served.adapter or card.model,
                "headrace.context_length": card.context_length,
                "headrace.vocab_size": card.vocab_size,
            },
            capabilities=_capabilities(served),
        )
        return msgspec.json.encode(shown)

    def _ready(self) -> list[Served]:
        models = self._models
        return [models.get(name) for name in models.listed_names()]


def _entry(served: Served) -> OllamaModel:
    card = served.card
    name = served.name
    return OllamaModel(
        name=name,
        model=name,
        modified_at=_time(served),
        digest=hashlib.sha256(name.encode() + b"\n" + msgspec.json.encode(card)).hexdigest(),
        details=OllamaDetails(parent_model=card.model if served.adapter else ""),
    )


def _time(served: Served) -> str:
    return datetime.fromtimestamp(int(served.card.created), UTC).isoformat().replace("+00:00", "Z")


def _capabilities(served: Served) -> list[str]:
    card = served.card
    there = {
        "completion": bool({"chat", "completion"} & set(card.kinds)),
        "tools": card.tool_parser is not None,
        "thinking": card.reasoning_parser is not None,
        "vision": "image" in card.media,
        "embedding": "embedding" in card.kinds,
    }
    return [name for name, has in there.items() if has]


def _json(value: OllamaModels | OllamaVersion) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _mount(site: Site) -> None:
    chat, models = chat_api(site), site.models
    embeddings = EmbeddingApi(site.model_cache, site.settings)
    site.generate("/api/chat", OllamaChatApi(chat, models))
    site.generate("/api/generate", OllamaPromptApi(chat, site.model_cache, models, site.settings))
    site.generate("/api/embed", OllamaEmbedApi(embeddings, models))
    site.generate("/api/embeddings", OllamaVectorApi(embeddings, models))
    routes = OllamaModelRoutes(models)
    site.answer("/api/show", routes.show, form=OllamaForm())
    site.routes += routes.routes()


def _paths() -> dict[str, Any]:
    def asking(summary: str, request: str, answer: str, *, streams: bool = False) -> dict[str, Any]:
        post = generation(summary, request, answer, error="OllamaFault", streams=False)
        if streams:
            post["responses"]["200"]["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
        return {"post": post}

    models = {"200": json_answer("the models", "OllamaModels")}
    return {
        "/api/chat": asking("Answer a conversation, in lines", "OllamaChatRequest", "OllamaChatAnswer", streams=True),
        "/api/generate": asking("Answer a prompt, in lines", "OllamaPromptRequest", "OllamaPromptAnswer", streams=True),
        "/api/embed": asking("Embed texts", "OllamaEmbedRequest", "OllamaEmbedAnswer"),
        "/api/embeddings": asking("Embed a text, in the older form", "OllamaVectorRequest", "OllamaVectorAnswer"),
        "/api/show": asking("Describe a model", "OllamaShowRequest", "OllamaShown"),
        "/api/tags": {"get": operation("List the served models", models)},
        "/api/ps": {"get": operation("List the loaded models, which are the served ones", models)},
        "/api/version": {"get": operation("The version of the API", {"200": json_answer("the version", "OllamaVersion")})},
    }


API = HttpApi(
    mount=_mount,
    paths=_paths,
    types=SCHEMAS,
    error_form=OllamaForm(),
    speaks=lambda path, _headers: path.startswith(PREFIX),
)
