"""Plans requests of `POST /api/chat`, `/api/generate`, `/api/embed` and `/api/embeddings`."""

from __future__ import annotations

import time
from functools import partial

import msgspec

from headrace.broker.errors import UnknownModel
from headrace.frontend.generation.plan import GenerationOptions, GenerationPlan, Plan, plan_generation
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.http_exchange import DisconnectWatch, HttpExchange
from headrace.frontend.ollama.errors import OllamaForm
from headrace.frontend.ollama.schema import (
    KeepAlive,
    OllamaChatRequest,
    OllamaEmbedAnswer,
    OllamaEmbedRequest,
    OllamaPromptRequest,
    OllamaRequest,
    OllamaVectorAnswer,
    OllamaVectorRequest,
)
from headrace.frontend.ollama.translate import chat_of, chat_of_prompt, raw_generation_of
from headrace.frontend.ollama.writers import (
    NDJSON,
    AnswerRecord,
    AnswerShape,
    ChatShape,
    OllamaLines,
    OllamaWriter,
    PromptShape,
)
from headrace.frontend.openai.chat_adapter import ChatAdapter, ChatOptions
from headrace.frontend.pooling.embeddings import EmbeddingApi
from headrace.frontend.pooling.schema import EmbeddingRequest
from headrace.frontend.pooling.vectors import floats
from headrace.frontend.pooling.writers import VectorAnswer, VectorWriter
from headrace.frontend.ports import Models
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit
from headrace.frontend.schema.chat import ChatRequest
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.writers.usage import UsageCounter

ID_PREFIX = "ollama-"
LATEST = ":latest"  # the tag that Ollama's clients add to names without one

_chat = msgspec.json.Decoder(OllamaChatRequest)
_prompt = msgspec.json.Decoder(OllamaPromptRequest)
_embed = msgspec.json.Decoder(OllamaEmbedRequest)
_vector = msgspec.json.Decoder(OllamaVectorRequest)


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
    """Plans conversations."""

    def __init__(self, chat: ChatAdapter, models: Models) -> None:
        self._chat = chat
        self._models = models
        self.error_form = OllamaForm()

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
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
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
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
    """Plans embeddings of one text or many."""

    def __init__(self, embeddings: EmbeddingApi, models: Models) -> None:
        self._embeddings = embeddings
        self._models = models
        self.error_form = OllamaForm()

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
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
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
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
