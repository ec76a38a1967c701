"""Renders stored jobs: plans them with the API that they belong to, and writes a whole answer or a durable stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, cast

import msgspec
import structlog
from starlette.types import Message

from headrace.broker.codec import decode, unpack_u32
from headrace.broker.durable.errors import JobRejected
from headrace.broker.durable.names import RUN_MARK, is_made_for, job_of_run, made_at, run_id
from headrace.broker.durable.stored_job import StoredJob
from headrace.broker.errors import AdmissionError, BrokerUnavailable, WireError
from headrace.broker.ingress.stream import fault_error
from headrace.broker.jobs import Job
from headrace.broker.messages.durable import ResultResponse, ResultTokens
from headrace.broker.messages.frames import JobFault, Row
from headrace.broker.messages.requests import Envelope, Generation
from headrace.frontend.errors import BadRequest, ErrorForm, FrontendError, StatusForm, translate
from headrace.frontend.generation.endpoint import Api
from headrace.frontend.generation.plan import Plan, check_size
from headrace.frontend.generation.request_checks import check_choices
from headrace.frontend.generation.sse import Head, StreamWriter, UsageCounter, WholeWriter
from headrace.frontend.http.bodies import check_shape, unsupported
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.metrics import Metrics
from headrace.frontend.openai.token_generation import TokenEvents, TokenOptions, TokenWriter
from headrace.frontend.ports import Models
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import REQUEST_CLASSES, RequestClass, slug

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TRUE = msgspec.Raw(b"true")

_NOT_WHOLE = ("stream", "stream_options", "background")


def whole_body(body: bytes) -> bytes:
    """Return a body that asks for a whole answer. One that is no JSON object stays as it is: its API says what is wrong."""
    fields = _fields(body)
    if fields is None or not any(name in fields for name in _NOT_WHOLE):
        return body
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in _NOT_WHOLE})


def stream_body(body: bytes) -> bytes:
    """Return a body that asks for a stream. One that is no JSON object stays as it is."""
    fields = _fields(body)
    if fields is None or fields.get("stream") == _TRUE:
        return body
    return msgspec.json.encode({**fields, "stream": _TRUE})


def asks(body: bytes, name: str) -> bool:
    fields = _fields(body)
    return fields is not None and fields.get(name) == _TRUE


def _fields(body: bytes) -> dict[str, msgspec.Raw] | None:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        return None


async def plan_envelope(
    envelope: Envelope, exchange: HttpExchange, model_cache: ModelCache, settings: FrontendSettings
) -> Plan:
    """Plan the request of an Envelope. Raises a FrontendError or an AdmissionError."""
    generation = _generation(envelope)
    check_choices(envelope.choices, 1, settings)
    model = await model_cache.get(generation.adapter or envelope.adapter or envelope.model)
    model.check_kind("completion")
    card, sampling = model.card, generation.sampling
    wanted = sampling.max_tokens or envelope.max_tokens or None
    limit = LengthLimit(context_length=card.context_length, wanted=wanted, truncate=None, param="token_ids")
    salt = exchange.salt(generation.cache_salt)
    prompt = await model.encoder.take_ids(unpack_u32(generation.token_ids), limit=limit, salt=salt)
    check_size(generation, None, choices=envelope.choices, prompt_tokens=prompt.tokens)
    max_tokens = wanted or card.default_max_tokens or card.context_length - prompt.tokens
    job = Job(
        id=exchange.job_id(),
        card=card,
        generation=msgspec.structs.replace(
            generation,
            sampling=msgspec.structs.replace(sampling, max_tokens=max_tokens),
            adapter=model.adapter,
            parse=None,
            cache_salt=salt,
        ),
        prompt_tokens=prompt.tokens,
        max_tokens=max_tokens,
        hashes=prompt.hashes,
        choices=envelope.choices,
        priority=envelope.priority,
        adapter=model.adapter or "",
        session=envelope.session,
        affinity=envelope.affinity,
        worker=envelope.worker,
        ttft_target_s=envelope.ttft_target_s,
        itl_target_s=envelope.itl_target_s,
        agent_priority=envelope.agent_priority,
        require=envelope.require,
        prefer=envelope.prefer,
    )
    head = Head(f"generate-tokens-{job_of_run(job.id)}", exchange.created, model.name, model.fingerprint)
    counter = UsageCounter([prompt.tokens], envelope.choices)
    options = TokenOptions(mode="tokens", choices=envelope.choices, logprobs=generation.logprobs)
    if not exchange.durable:
        return Plan([job], TokenWriter(head, counter, options), counter)
    return Plan([job], TokenEvents(head, counter, options), counter, whole=TokenWriter(head, counter.fresh(), options))


def _generation(envelope: Envelope) -> Generation:
    """Return the payload of an Envelope. Raises BadRequest for one that cannot be a stored job."""
    if envelope.kind != "generate":
        raise unsupported("kind", f"{envelope.kind!r} is not supported in a job: use /v1/embeddings with the text or its ids")
    if envelope.spill is not None:
        raise unsupported("spill", "is not supported in a job: the payload must be in the message")
    if envelope.choices < 1:
        raise BadRequest(f"choices must be at least 1, got {envelope.choices}", param="choices")
    try:
        generation = decode(Generation, envelope.payload)
        ids = len(generation.token_ids)
    except WireError as error:
        raise BadRequest(f"the payload is not a Generation: {error}", param="payload") from None
    if generation.media or generation.prompt_embeds:
        raise unsupported("media", "and embeddings are not supported in an Envelope: use the body of /v1/chat/completions")
    if not ids or ids % 4:
        raise BadRequest(f"token_ids must be u32, little endian, and not empty; got {ids} bytes", param="token_ids")
    return generation


class JobExchange(HttpExchange):
    """An exchange without a connection. Its requests are named after one run of the job, its answer after the job."""

    def __init__(self, job: StoredJob, run: str, *, isolated: bool = False) -> None:
        """`run` is the id of the job's first request; those of the others are made of it.

        `isolated`: the prefix caches of tenants are kept apart.
        """
        scope = {
            "type": "job",
            "headers": [],
            "headrace.request_id": run,
            "headrace.tenant": job.tenant,
            "headrace.isolated": isolated,
        }
        super().__init__(scope, _receive, _send)
        self._job = job
        self._run = run
        self._parts = 0
        self.durable = job.durable
        self.from_publisher = not is_made_for(job.name, job.tenant)
        self.job_token = job.token
        self.stored_job = job.id

    async def take_body(self, body: bytes, settings: FrontendSettings) -> None:
        """Check that a body is safe to decode. Raises MalformedBody."""
        self.body_size = self.asked_bytes = len(body)
        await check_shape(body, settings)

    def job_id(self) -> str:
        """Return an id for a request of the job: the run's, then its parts'."""
        part, self._parts = self._parts, self._parts + 1
        if not part:
            return self._run
        return run_id(job_of_run(self._run), self._run.partition(RUN_MARK)[2], part)

    def plan_again(self, job_id: str) -> None:
        self._parts = 0

    @property
    def created(self) -> int:
        """Return when the job was named or stored, so that every frontend makes the same answer."""
        return made_at(self._job.name, self._job.tenant) or int(self._job.created)


async def _receive() -> NoReturn:
    raise AssertionError("a stored job has no connection to read from")


async def _send(message: Message) -> NoReturn:
    raise AssertionError("a stored job has no connection to write to")


Charge = Callable[[str, int, int], None]

_EVENT_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"


class RenderedAnswer:
    """A job that one of the APIs has planned, and the writer of its answer."""

    def __init__(
        self,
        job: StoredJob,
        plan: Plan,
        requests: Sequence[Job],
        form: ErrorForm,
        metrics: Metrics,
        *,
        charge: Charge | None = None,
    ) -> None:
        """`requests` are those of the plan, with the options of the stored job. `charge` takes the tenant, the
        tokens of its prompt and those of its answer.
        """
        self._charge = charge
        self._metrics = metrics
        self.requests = requests
        self._job = job
        self._writer = plan.writer
        self._whole: WholeWriter | None = plan.writer if isinstance(plan.writer, WholeWriter) else plan.whole
        self._counter = plan.counter
        self._form = form
        self._error: FrontendError | None = None

    @property
    def open(self) -> bool:
        """True while more rows are needed."""
        return self._error is None and self._writer.open > 0

    def take(self, rows: list[Row]) -> list[bytes]:
        """Take rows. Returns the events that they make for the clients of a durable stream; a plain job makes none."""
        writer = self._writer
        if not isinstance(writer, StreamWriter):
            writer.take(rows)
            return []
        if self._whole is not None:
            self._whole.take(rows)
        return events_of(writer.events(rows))

    async def finish(self) -> list[bytes]:
        """Finish after the last row and return the last events. Raises as the writer does."""
        writer = self._writer
        if writer.unsettled:
            await writer.settle()
        return events_of(writer.closing()) if isinstance(writer, StreamWriter) else []

    def fail(self, fault: JobFault) -> list[bytes]:
        """End the answer with a fault. Returns the last events."""
        self._error = error = translate(fault_error(fault))
        return events_of(self._writer.failure(error)) if isinstance(self._writer, StreamWriter) else []

    def response(self) -> ResultResponse:
        """Return the whole answer; after `fail` the error in the form of its API."""
        if self._error is not None:
            status = self._form.status(self._error) if isinstance(self._form, StatusForm) else self._error.status
            return self._answer(status, self._form(self._error))
        assert self._whole is not None  # noqa: S101  # the renderer refuses streams without it
        return self._answer(200, self._whole.body())

    def _answer(self, status: int, body: bytes) -> ResultResponse:
        return ResultResponse(status_code=status, request_id=self._job.id, body=msgspec.Raw(body))

    @property
    def tokens(self) -> ResultTokens:
        """The tokens counted so far."""
        counter = self._counter
        return ResultTokens(
            prompt=counter.prompt,
            cached=counter.cached,
            completion=counter.completion,
            reasoning=counter.reasoning or 0,
        )

    def settled(self) -> None:
        """Count the tokens of a job whose result was seen."""
        counter = self._counter
        if counter.completion or counter.ended:
            model = self.requests[0].card.model
            self._metrics.count_tokens(
                model, prompt=counter.prompt, cached=counter.cached, output=counter.completion, source="job"
            )
            if self._charge is not None:
                self._charge(self.requests[0].tenant, counter.prompt, counter.completion)


def events_of(stream: bytes) -> list[bytes]:
    """Return the JSON of the events of a stream. The mark of its end is none: readers add it."""
    found = [event.partition(_DATA)[2] for event in stream.split(_EVENT_END) if event]
    return [data for data in found if data and data != _DONE]


# Renders stored jobs by the APIs that answer HTTP requests, so that both get the same answers.

log = structlog.get_logger()

LEAST_DEADLINE_S = 0.001


class ApiRenderer:
    """Renders the jobs of every path that has an API here, and those of Envelopes."""

    def __init__(
        self,
        apis: Mapping[str, Api],
        models: Models,
        model_cache: ModelCache,
        settings: FrontendSettings,
        metrics: Metrics,
        *,
        charge: Charge | None = None,
        isolates: Callable[[], bool] = lambda: False,
    ) -> None:
        """`apis` by path. `charge` takes the tenant of each job and the tokens that it used.

        `isolates`: the prefix caches of tenants are kept apart now.
        """
        self._charge = charge
        self._isolates = isolates
        self._metrics = metrics
        self._apis = apis
        self._models = models
        self._model_cache = model_cache
        self._settings = settings

    def serves(self, model_slug: str) -> bool:
        """Return whether a model, or an alias or adapter that has a worker, is of this slug."""
        return any(slug(name) == model_slug for name in (*self._models.names(), *self._models.listed_names()))

    async def render(self, job: StoredJob, run: str) -> RenderedAnswer:
        """Plan a job for the run of this id.

        Raises JobRejected for a job that can never run as it is, AdmissionError for one that cannot run now.
        """
        form: ErrorForm = FrontendError.body
        try:
            api = self._api(job)
            form = api.error_form if api is not None else form
            plan = await self._plan(job, api, JobExchange(job, run, isolated=self._isolates()))
            _check_stream(job, plan)
        except JetStreamError as error:
            raise BrokerUnavailable(str(error)) from error
        except Exception as error:
            if isinstance(error, AdmissionError) and error.retriable:
                raise
            seen = translate(error)
            if seen.retriable:
                raise BrokerUnavailable(str(seen)) from error
            if type(seen) is FrontendError:
                log.error("job.not_rendered", request_id=run, exc_info=error)
            raise _rejected(seen, form) from error
        requests = [_with_options(request, job) for request in plan.jobs]
        return RenderedAnswer(job, plan, requests, form, self._metrics, charge=self._charge)

    def _api(self, job: StoredJob) -> Api | None:
        """Return the API of a job; None for an Envelope. Raises BadRequest."""
        if job.envelope is not None:
            return None
        api = self._apis.get(job.endpoint)
        if api is None:
            paths = ", ".join(sorted(self._apis))
            raise BadRequest(f"no job can be for {job.endpoint[:200]!r}; jobs are for {paths}", param="endpoint")
        return api

    async def _plan(self, job: StoredJob, api: Api | None, exchange: JobExchange) -> Plan:
        if api is None:
            assert job.envelope is not None  # noqa: S101  # `_api` has looked
            return await plan_envelope(job.envelope, exchange, self._model_cache, self._settings)
        body = stream_body(job.body) if job.durable else whole_body(job.body)
        await exchange.take_body(body, self._settings)
        return await api.plan(body, exchange)


def _check_stream(job: StoredJob, plan: Plan) -> None:
    """Refuse a durable stream of an API that has none, or of several requests. Raises BadRequest."""
    if not job.durable:
        return
    if plan.whole is None:
        raise BadRequest(f"an answer of {job.endpoint[:200]} cannot be a durable stream", param="stream")
    if len(plan.jobs) > 1:
        raise BadRequest(f"a durable stream has one prompt, this one has {len(plan.jobs)}", param="prompt")


def _with_options(request: Job, job: StoredJob) -> Job:
    """Return a request with the class and the deadline of the stored job in place of those in its body."""
    known = job.request_class in REQUEST_CLASSES
    return msgspec.structs.replace(
        request,
        name=job.token,
        tenant=job.tenant,
        request_class=cast("RequestClass", job.request_class) if known else "std",
        deadline_s=max(job.deadline - time.time(), LEAST_DEADLINE_S),
        explain=False,
    )


def _rejected(error: FrontendError, form: ErrorForm) -> JobRejected:
    status = form.status(error) if isinstance(form, StatusForm) else error.status
    return JobRejected(str(error), status=status, body=form(error))
