"""Plans requests of `POST /v1/embeddings`, `/v1/classify` and `/pooling`: every input becomes one vector."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.broker.durable.names import job_of_run
from headrace.broker.jobs import Job
from headrace.broker.messages import PoolingTask
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import Plan
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.pooling.inputs import Bounds, Encoded, encode_inputs, list_inputs
from headrace.frontend.pooling.jobs import PoolingOptions, activation_of, check_inputs, pooling_jobs, refuse_formats
from headrace.frontend.pooling.schema import ClassifyRequest, EmbeddingRequest, Inputs, PoolingBase, PoolingRequest
from headrace.frontend.pooling.writers import ClassifyWriter, EmbeddingWriter, VectorAnswer
from headrace.frontend.prompts.model_cache import LoadedModel, ModelCache
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.writers.sse import Head
from headrace.frontend.writers.usage import UsageCounter

PURPOSES = {"embed": "embedding generation", "classify": "classification"}

_embedding = msgspec.json.Decoder(EmbeddingRequest)
_classify = msgspec.json.Decoder(ClassifyRequest)
_pooling = msgspec.json.Decoder(PoolingRequest)


class _VectorApi:
    """Base of the APIs with one vector per input."""

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
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
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
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
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
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
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
    """Return the inputs of the writer for the answer to these jobs."""
    return VectorAnswer(
        head=Head(f"{prefix}{job_of_run(jobs[0].id)}", exchange.created, model.card.model, model.fingerprint),
        counter=UsageCounter([encoded.tokens for encoded in inputs], 1),
        inputs=len(inputs),
        encoder=model.encoder,
    )
