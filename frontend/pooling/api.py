"""Plans embeddings, classifications, vectors, scores and rankings, for all paths of the pooling APIs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.broker.durable.names import job_of_run
from headrace.broker.jobs import Job
from headrace.broker.messages.requests import PoolingTask
from headrace.frontend.apis import HttpApi, Site
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.endpoint import Api
from headrace.frontend.generation.plan import Plan
from headrace.frontend.generation.sse import Head, UsageCounter
from headrace.frontend.http.bodies import ReportingDecoder, decode_request, unsupported
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.openapi import generation
from headrace.frontend.pooling.jobs import (
    Bounds,
    Encoded,
    PoolingOptions,
    activation_of,
    check_inputs,
    encode_inputs,
    encode_pairs,
    list_inputs,
    pooling_jobs,
    refuse_formats,
)
from headrace.frontend.pooling.schema import (
    ClassifyAnswer,
    ClassifyRequest,
    EmbeddingAnswer,
    EmbeddingRequest,
    Inputs,
    PoolingAnswer,
    PoolingBase,
    PoolingRequest,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
    ScoringBase,
    Text,
    Texts,
)
from headrace.frontend.pooling.writers import ClassifyWriter, EmbeddingWriter, RerankWriter, ScoreWriter, VectorAnswer
from headrace.frontend.prompts.model_cache import LoadedModel, ModelCache
from headrace.frontend.settings import FrontendSettings

PURPOSES = {"embed": "embedding generation", "classify": "classification"}

_embedding = ReportingDecoder(EmbeddingRequest)
_classify = ReportingDecoder(ClassifyRequest)
_pooling = ReportingDecoder(PoolingRequest)


class _VectorApi:
    def __init__(self, model_cache: ModelCache, settings: FrontendSettings) -> None:
        self._model_cache = model_cache
        self._settings = settings
        self.error_form = FrontendError.body

    async def inputs(self, request: PoolingBase, given: Inputs, model: LoadedModel, task: PoolingTask) -> list[Encoded]:
        """Encode the inputs of a request. Raises BadRequest, ContextTooLong."""
        inputs = await list_inputs(given)
        check_inputs(len(inputs), self._settings, param="input")
        bounds = Bounds(
            context_length=model.card.context_length,
            truncate=request.truncate_prompt_tokens,
            side=request.truncation_side or "right",
            special=request.add_special_tokens is not False,
            purpose=PURPOSES[task],
            param="input",
        )
        return await encode_inputs(model.encoder, inputs, bounds)

    def jobs(
        self,
        request: PoolingBase,
        exchange: HttpExchange,
        model: LoadedModel,
        inputs: Sequence[Encoded],
        *,
        task: PoolingTask,
        dimensions: int | None = None,
    ) -> list[Job]:
        """Make the jobs of encoded inputs. Raises BadRequest."""
        normalize = activation_of(request)
        options = PoolingOptions(task, dimensions, normalize)
        return pooling_jobs(request, exchange, model, self._settings, inputs, options)


class EmbeddingApi(_VectorApi):
    """Plans embeddings. It keeps no state but the cache of loaded models."""

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_embedding, body)
        jobs, answer = await self.plan_vectors(request, exchange)
        return Plan(jobs, EmbeddingWriter(answer, base64=request.encoding_format == "base64"), answer.counter)

    async def plan_vectors(self, request: EmbeddingRequest, exchange: HttpExchange) -> tuple[list[Job], VectorAnswer]:
        """Plan the jobs of a request, for a writer of any API. Raises a FrontendError or an AdmissionError."""
        refuse_messages(request.messages)
        refuse_formats(request.embed_dtype, request.endianness)
        model = await self._model_cache.get(request.model)
        model.check_kind("embedding")
        inputs = await self.inputs(request, request.input, model, "embed")
        jobs = self.jobs(request, exchange, model, inputs, task="embed", dimensions=request.dimensions)
        return jobs, vector_answer("embd-", exchange, jobs, model, inputs)


class ClassifyApi(_VectorApi):
    """Plans classifications. It keeps no state but the cache of loaded models."""

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_classify, body)
        refuse_messages(request.messages)
        model = await self._model_cache.get(request.model)
        model.check_kind("classify")
        inputs = await self.inputs(request, request.input, model, "classify")
        jobs = self.jobs(request, exchange, model, inputs, task="classify")
        answer = vector_answer("classify-", exchange, jobs, model, inputs)
        return Plan(jobs, ClassifyWriter(answer, labels=model.card.labels), answer.counter)


class PoolingApi(_VectorApi):
    """Plans plain vectors of any task of the model. It keeps no state but the cache of loaded models."""

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_pooling, body)
        refuse_messages(request.messages)
        refuse_formats(request.embed_dtype, request.endianness)
        model = await self._model_cache.get(request.model)
        task = _task(request.task, model)
        if request.dimensions is not None and task != "embed":
            raise BadRequest("dimensions are of embeddings", param="dimensions")
        inputs = await self.inputs(request, request.input, model, task)
        jobs = self.jobs(request, exchange, model, inputs, task=task, dimensions=request.dimensions)
        answer = vector_answer("pool-", exchange, jobs, model, inputs)
        base64 = request.encoding_format == "base64"
        return Plan(jobs, EmbeddingWriter(answer, base64=base64, kind="pooling", field="data"), answer.counter)


def _task(wanted: str | None, model: LoadedModel) -> PoolingTask:
    if wanted not in (None, "embed", "classify"):
        raise unsupported("task", f"{wanted!r} is not supported here: embed and classify are")
    kinds = model.card.kinds
    if wanted == "embed" or (wanted is None and "embedding" in kinds):
        model.check_kind("embedding")
        return "embed"
    if not {"classify", "score"} & set(kinds):
        model.check_kind("classify" if wanted else "embedding")
    return "classify"


def refuse_messages(messages: object) -> None:
    """Refuse conversations, which are not supported by pooling. Raises BadRequest."""
    if messages is not None:
        raise unsupported("messages", "is not supported here: give the text as input")


def vector_answer(
    prefix: str, exchange: HttpExchange, jobs: Sequence[Job], model: LoadedModel, inputs: Sequence[Encoded]
) -> VectorAnswer:
    return VectorAnswer(
        head=Head(f"{prefix}{job_of_run(jobs[0].id)}", exchange.created, model.card.model, model.fingerprint),
        counter=UsageCounter([encoded.tokens for encoded in inputs], 1),
        inputs=len(inputs),
        encoder=model.encoder,
    )


# Plans requests of `POST /v1/score` and `/v1/rerank`, which score the similarity of texts.
#
# A model that scores pairs reads both texts at once. With a model that only makes embeddings, every text is embedded, a query
# of many documents once, and the score is the cosine of the two vectors.

_score = ReportingDecoder(ScoreRequest)
_rerank = ReportingDecoder(RerankRequest)

SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class _ScoringApi:
    """Base of the APIs that compare texts."""

    def __init__(self, model_cache: ModelCache, settings: FrontendSettings) -> None:
        self._model_cache = model_cache
        self._settings = settings
        self.error_form = FrontendError.body

    async def model(self, request: ScoringBase) -> LoadedModel:
        """Return the model of a request. Raises UnknownModel, and BadRequest if it cannot score."""
        for name in ("instruction", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise unsupported(name, "is not supported here: pairs are put together by the tokenizer")
        model = await self._model_cache.get(request.model)
        if "embedding" not in model.card.kinds:
            model.check_kind("score")
        return model

    async def encode(
        self, request: ScoringBase, model: LoadedModel, first: Sequence[str], second: Sequence[str], params: tuple[str, str]
    ) -> tuple[list[Encoded], PoolingTask, int | None]:
        """Return the inputs, the engine's task, and the number of first texts among the inputs (None: all are pairs)."""
        check_inputs(len(second), self._settings, param=params[1])
        if len(first) not in (1, len(second)):
            raise BadRequest(
                f"{len(first)} {params[0]} do not go with {len(second)} {params[1]}: give one, or as many", param=params[0]
            )
        cuts = [self._cut(request, model, name) for name in ("max_tokens_per_query", "max_tokens_per_doc")]
        if "score" in model.card.kinds:
            queries = first if len(first) > 1 else [first[0]] * len(second)
            bounds = self._bounds(request, model, params[1], first=cuts[0], second=cuts[1])
            return await encode_pairs(model.encoder, list(zip(queries, second, strict=True)), bounds), "classify", None
        inputs: list[Encoded] = []
        for texts, cut, param in zip((first, second), cuts, params, strict=True):
            inputs += await encode_inputs(model.encoder, texts, self._bounds(request, model, param, text=cut))
        return inputs, "embed", len(first)

    def _cut(self, request: ScoringBase, model: LoadedModel, name: str) -> int:
        wanted = getattr(request, name) or 0
        if wanted >= model.card.context_length:
            raise BadRequest(
                f"{name} ({wanted}) must be below the model's context length ({model.card.context_length})", param=name
            )
        return int(wanted)

    def _bounds(
        self, request: ScoringBase, model: LoadedModel, param: str, *, first: int = 0, second: int = 0, text: int = 0
    ) -> Bounds:
        return Bounds(
            context_length=model.card.context_length,
            truncate=request.truncate_prompt_tokens,
            side=request.truncation_side or "right",
            special=request.add_special_tokens is not False,
            first=first,
            second=second,
            text=text,
            purpose="scoring",
            param=param,
        )


class ScoreApi(_ScoringApi):
    """Plans scores. It keeps no state but the cache of loaded models."""

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_score, body)
        one, two, params = _sides(request)
        model = await self.model(request)
        inputs, task, queries = await self.encode(request, model, texts_of(one, params[0]), texts_of(two, params[1]), params)
        options = PoolingOptions(task, normalize=activation_of(request))
        jobs = pooling_jobs(request, exchange, model, self._settings, inputs, options)
        answer = vector_answer("score-", exchange, jobs, model, inputs)
        return Plan(jobs, ScoreWriter(answer, queries=queries), answer.counter)


class RerankApi(_ScoringApi):
    """Plans rankings. It keeps no state but the cache of loaded models."""

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_rerank, body)
        model = await self.model(request)
        documents = texts_of(request.documents, "documents")
        inputs, task, queries = await self.encode(
            request, model, texts_of(request.query, "query"), documents, ("query", "documents")
        )
        options = PoolingOptions(task, normalize=activation_of(request))
        jobs = pooling_jobs(request, exchange, model, self._settings, inputs, options)
        answer = vector_answer("rerank-", exchange, jobs, model, inputs)
        writer = RerankWriter(
            answer,
            queries=queries,
            documents=documents,
            most=request.top_n or 0,
            with_documents=request.return_documents is not False,
        )
        return Plan(jobs, writer, answer.counter)


def _sides(request: ScoreRequest) -> tuple[Texts, Texts, tuple[str, str]]:
    """Return both sides and their parameters. Raises BadRequest if none or several pairs of names are given."""
    given = {name for pair in SIDES for name in pair if getattr(request, name) is not None}
    for names in SIDES:
        if given == set(names):
            return getattr(request, names[0]), getattr(request, names[1]), names
    known = ", ".join(" and ".join(names) for names in SIDES)
    if not given:
        raise BadRequest(f"missing required parameter: one of {known}", param="text_1", code="missing_required_parameter")
    raise BadRequest(f"{', '.join(sorted(given))} do not go together; give one of {known}", param=min(given))


def texts_of(given: Texts, param: str) -> list[str]:
    """Return texts that are given as strings or as objects with a `text`. Raises BadRequest for others."""
    texts: list[Text] = given if isinstance(given, list) else [given]
    plain = []
    for index, text in enumerate(texts):
        if isinstance(text, str):
            plain.append(text)
            continue
        where = f"{param}[{index}]" if isinstance(given, list) else param
        if not isinstance(text.get("text"), str):
            raise unsupported(where, "must be a text, or an object with a text: other content is not supported here")
        plain.append(text["text"])
    return plain


_APIS: tuple[tuple[Callable[[ModelCache, FrontendSettings], Api], tuple[str, ...]], ...] = (
    (EmbeddingApi, ("/v1/embeddings",)),
    (RerankApi, ("/v1/rerank", "/v2/rerank", "/rerank")),
    (ScoreApi, ("/v1/score", "/score")),
    (ClassifyApi, ("/v1/classify", "/classify")),
    (PoolingApi, ("/v1/pooling", "/pooling")),
)


def _mount(site: Site) -> None:
    for make, paths in _APIS:
        api = make(site.model_cache, site.settings)
        for path in paths:
            site.generate(path, api, job=api)


def _paths() -> dict[str, Any]:
    routes = {
        ("/v1/embeddings",): ("Embed inputs", "EmbeddingRequest", "EmbeddingAnswer"),
        ("/v1/score", "/score"): ("Score pairs of texts", "ScoreRequest", "ScoreAnswer"),
        ("/v1/rerank", "/v2/rerank", "/rerank"): ("Order documents by a query", "RerankRequest", "RerankAnswer"),
        ("/v1/classify", "/classify"): ("Classify inputs", "ClassifyRequest", "ClassifyAnswer"),
        ("/v1/pooling", "/pooling"): ("The plain vectors of inputs", "PoolingRequest", "PoolingAnswer"),
    }
    return {path: {"post": generation(*texts, streams=False)} for names, texts in routes.items() for path in names}


API = HttpApi(
    mount=_mount,
    paths=_paths,
    types=(
        EmbeddingRequest,
        EmbeddingAnswer,
        PoolingRequest,
        PoolingAnswer,
        ClassifyRequest,
        ClassifyAnswer,
        ScoreRequest,
        ScoreAnswer,
        RerankRequest,
        RerankAnswer,
    ),
)
