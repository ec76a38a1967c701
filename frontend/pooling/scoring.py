"""Plans requests of `POST /v1/score` and `/v1/rerank`, which score the similarity of texts.

A model that scores pairs reads both texts at once. With a model that only makes embeddings, every text is embedded, a query of
many documents once, and the score is the cosine of the two vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.broker.messages import PoolingTask
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import Plan
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.pooling.embeddings import vector_answer
from headrace.frontend.pooling.inputs import Bounds, Encoded, encode_inputs, encode_pairs
from headrace.frontend.pooling.jobs import PoolingOptions, activation_of, check_inputs, pooling_jobs
from headrace.frontend.pooling.schema import RerankRequest, ScoreRequest, ScoringBase, Text, Texts
from headrace.frontend.pooling.writers import RerankWriter, ScoreWriter
from headrace.frontend.prompts.model_cache import LoadedModel, ModelCache
from headrace.frontend.settings import FrontendSettings

_score = msgspec.json.Decoder(ScoreRequest)
_rerank = msgspec.json.Decoder(RerankRequest)

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
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
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
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
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
