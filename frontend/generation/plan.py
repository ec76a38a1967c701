"""Turns a generation request and its encoded prompts into jobs, with sampling, stop strings and guided decoding."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from starlette.requests import Request

from headrace.broker.durable.names import job_of_run
from headrace.broker.errors import RequestOverLimit
from headrace.broker.jobs import Job, check_limits
from headrace.broker.messages.requests import Generation, Parsing, Sampling
from headrace.broker.models.cards import ModelCard
from headrace.frontend.auth.caller import check_model
from headrace.frontend.auth.gate import TENANT_HEADER, tenant_of_scope
from headrace.frontend.chat_schema import GenerationRequest, ResponseFormat, StructuredOutputs
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.job_options import job_options_of, tier_of
from headrace.frontend.generation.sse import Head, StreamWriter, UsageCounter, WholeWriter
from headrace.frontend.http.bodies import missing
from headrace.frontend.http.exchange import DisconnectWatch, HttpExchange
from headrace.frontend.prompts.model_cache import LoadedModel
from headrace.frontend.prompts.prompt_encoder import Prompt
from headrace.frontend.settings import FrontendSettings

_GUIDED = "structured_outputs"


def check_size(generation: Generation, request: GenerationRequest | None, *, choices: int, prompt_tokens: int) -> None:
    """Check a request. `request`: as the client sent it, None if it came as a Generation. Raises BadRequest."""
    try:
        check_limits(generation, choices=choices, prompt_tokens=prompt_tokens)
    except RequestOverLimit as error:
        param = _name(error.param, request) if request is not None else error.param
        raise BadRequest(str(error).replace(error.param, param, 1), param=param, code="parameter_too_large") from None


def _name(param: str, request: GenerationRequest) -> str:
    if not param.startswith(_GUIDED) or request.structured_outputs is not None:
        return param
    names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format")
    return next((name for name in names if getattr(request, name) is not None), param)


_WEIGHTS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_weights_of = attrgetter(*_WEIGHTS)
_PLAIN: tuple[Any, ...] = _weights_of(Sampling())
_WITH_IDS = ("stop_token_ids", "logit_bias", "allowed_token_ids")
_ids_in = attrgetter(*_WITH_IDS)
_constraints_in = attrgetter(
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "response_format")
)
_NOT_GUIDED = (None,) * 6

GUIDED_OPTIONS = frozenset({"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"})


def sampling_of(request: GenerationRequest, card: ModelCard, *, max_tokens: int) -> Sampling:
    """Return the sampling parameters.

    Raises BadRequest for token ids outside the vocabulary and for `min_tokens` above `max_tokens`.
    """
    defaults = card.default_sampling
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens})", param="min_tokens")
    stop_token_ids = request.stop_token_ids or []
    if extra_stops := defaults.get("stop_token_ids"):
        stop_token_ids = list(dict.fromkeys([*stop_token_ids, *extra_stops]))
    if card.vocab_size:
        for param, ids in zip(_WITH_IDS, _ids_in(request), strict=True):
            if ids:
                _check_ids(ids, card.vocab_size, param)
    given = [usual if value is None else value for value, usual in zip(_weights_of(request), _usual(defaults), strict=True)]
    temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty, repetition_penalty = given
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, top_k),
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        seed=request.seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=stop_token_ids,
        logit_bias=request.logit_bias or {},
        allowed_token_ids=request.allowed_token_ids,
        bad_words=request.bad_words or [],
    )


def _usual(defaults: Mapping[str, Any]) -> Sequence[Any]:
    """Return the values of `_WEIGHTS` for a request that gives none."""
    if not defaults:
        return _PLAIN
    return [defaults.get(name, plain) for name, plain in zip(_WEIGHTS, _PLAIN, strict=True)]


def _check_ids(ids: Any, vocab_size: int, param: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise BadRequest(f"token id {token} in {param} is outside the vocabulary of {vocab_size}", param=param)


def stops_of(request: GenerationRequest) -> list[str]:
    """Return the stop strings. Raises BadRequest for an empty one; their number and length are checked with the plan."""
    stop = request.stop
    if not stop:
        if stop == "":
            raise BadRequest("stop must not be an empty string", param="stop")
        return []
    stops = [stop] if isinstance(stop, str) else stop
    if not all(stops):
        raise BadRequest("stop must not contain an empty string", param="stop")
    return stops


def guided_of(request: GenerationRequest) -> dict[str, Any] | None:
    """Return the constraint on the output as `Generation.guided` has it. Raises BadRequest if there is more than one."""
    if _constraints_in(request) == _NOT_GUIDED:
        return None
    constraints: dict[str, tuple[str, Any]] = {}  # kind → (its parameter, value)

    def add(kind: str, param: str, value: Any) -> None:
        if value is None or value is False:
            return
        if constraints:
            raise BadRequest(f"{param} cannot be combined with {next(iter(constraints.values()))[0]}", param=param)
        constraints[kind] = (param, value)

    add("json", "guided_json", request.guided_json)
    add("regex", "guided_regex", request.guided_regex)
    add("choice", "guided_choice", request.guided_choice)
    add("grammar", "guided_grammar", request.guided_grammar)
    options: dict[str, Any] = {}
    if (outputs := request.structured_outputs) is not None:
        for kind in outputs.__struct_fields__:
            if kind not in GUIDED_OPTIONS:
                add(kind, f"structured_outputs.{kind}", getattr(outputs, kind))
            elif value := getattr(outputs, kind):
                options[kind] = value
    if request.response_format is not None:
        add(*_response_format(request.response_format))
    if not constraints:
        if request.structured_outputs is not None:
            kinds = ", ".join(kind for kind in StructuredOutputs.__struct_fields__ if kind not in GUIDED_OPTIONS)
            raise BadRequest(f"structured_outputs needs one of {kinds}", param="structured_outputs")
        return None
    return {kind: value for kind, (_, value) in constraints.items()} | options


def _response_format(shape: ResponseFormat) -> tuple[str, str, Any]:
    """Return kind, parameter and value; the value is None for plain text."""
    if shape.type == "json_object":
        return "json_object", "response_format", True
    if shape.type == "structural_tag":
        return "structural_tag", "response_format", _structural_tag(shape)
    if shape.type == "text":
        return "json", "response_format", None
    if shape.json_schema is None or shape.json_schema.schema is None:
        raise missing("response_format.json_schema.schema")
    return "json", "response_format", shape.json_schema.schema


def _structural_tag(shape: ResponseFormat) -> str:
    """Return the structural tag as JSON text, the form that grammar engines take."""
    tag: dict[str, Any] = {"type": "structural_tag"}
    if shape.format is not None:
        tag["format"] = shape.format
    elif shape.structures is not None and shape.triggers is not None:
        tag |= {"structures": shape.structures, "triggers": shape.triggers}
    else:
        raise missing("response_format.format")
    return msgspec.json.encode(tag).decode()


Detached = Callable[[HttpExchange, DisconnectWatch], Awaitable[None]]


class Plan(msgspec.Struct, frozen=True):
    """The jobs to run, and the writer that turns their rows into an answer: a stream exactly when the client asked for one."""

    jobs: list[Job]
    writer: StreamWriter | WholeWriter
    counter: UsageCounter
    detached: Detached | None = None  # runs the jobs, if any, apart from this connection and answers it, without `writer`
    whole: WholeWriter | None = None  # beside the stream of a durable request: takes the same rows


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a request in terms that all generating APIs share. `top_logprobs` None = no log probabilities at all."""

    id_prefix: str
    prompts: Sequence[Prompt]
    wanted: int | None  # tokens per choice; None = the model's default, or as many as fit
    at_most: int | None = None  # tokens per choice in place of `wanted`; no error if the context has room for fewer
    top_logprobs: int | None = None
    parse: Parsing | None = None
    freeform: frozenset[str] = frozenset()  # names of tools whose input is plain text
    prompt_logprobs: int | None = None  # alternatives per prompt token; None = no log probabilities of the prompt
    role: str = "assistant"  # of the answer
    prompt_text: str | None = None  # the rendered prompt, if it is part of the answer
    silent: bool = False  # the answer consists of the prompt alone


class GenerationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of a request and what every writer of its answer needs. `choices` counts those of all jobs."""

    jobs: list[Job]
    head: Head
    counter: UsageCounter
    model: LoadedModel
    options: GenerationOptions
    choices: int
    short: bool  # the context has room for fewer tokens than `options.at_most`

    def answered_by(self, writer: StreamWriter | WholeWriter, *, whole: WholeWriter | None = None) -> Plan:
        """Return the plan with the writer of one API, and the one of the whole answer if a stream has that as well."""
        return Plan(self.jobs, writer, self.counter, whole=whole)


def plan_generation(
    request: GenerationRequest,
    exchange: HttpExchange,
    model: LoadedModel,
    settings: FrontendSettings,
    options: GenerationOptions,
) -> GenerationPlan:
    """Make one job per prompt. Call it once per request, because the first job takes the request's own id.

    Raises BadRequest.
    """
    n = request.n or 1
    card = model.card
    jobs = _jobs(request, exchange, model, settings, options)
    tier = tier_of(request.service_tier).name if request.service_tier is not None else None
    name = f"{options.id_prefix}{request.request_id or job_of_run(jobs[0].id)}"
    return GenerationPlan(
        jobs=jobs,
        head=Head(name, exchange.created, model.name, model.fingerprint, tier),
        counter=UsageCounter(
            [prompt.tokens for prompt in options.prompts],
            n,
            reasoning=options.parse is not None and card.reasoning_parser is not None,
        ),
        model=model,
        options=options,
        choices=n * len(jobs),
        short=options.at_most is not None
        and any(card.context_length - prompt.tokens < options.at_most for prompt in options.prompts),
    )


def _max_tokens(options: GenerationOptions, default: int | None, room: int) -> int:
    wanted = options.at_most if options.at_most is not None else options.wanted
    return min(room, wanted if wanted is not None else default or room)


def _jobs(
    request: GenerationRequest,
    exchange: HttpExchange,
    model: LoadedModel,
    settings: FrontendSettings,
    options: GenerationOptions,
) -> list[Job]:
    card = model.card
    check_model(exchange.scope, model.adapter or card.model)
    stop = stops_of(request)
    guided = guided_of(request)
    job_options, routing = job_options_of(request, exchange, settings, session_id=request.session_id, nvext=request.nvext)
    extra = dict(request.vllm_xargs or {})
    if request.thinking_token_budget is not None and request.thinking_token_budget >= 0:
        extra["thinking_token_budget"] = request.thinking_token_budget
    jobs: list[Job] = []
    for prompt in options.prompts:
        max_tokens = _max_tokens(options, card.default_max_tokens, card.context_length - prompt.tokens)
        generation = Generation(
            token_ids=prompt.packed,
            sampling=sampling_of(request, card, max_tokens=max_tokens),
            stop=stop,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            logprobs=options.top_logprobs,
            prompt_logprobs=options.prompt_logprobs,
            guided=guided,
            adapter=model.adapter,
            cache_salt=exchange.salt(request.cache_salt),
            session_id=routing.session or None,
            prompt_embeds=prompt.embeds or None,
            media=list(prompt.media),
            extra=extra,
            parse=options.parse,
        )
        check_size(generation, request, choices=request.n or 1, prompt_tokens=prompt.tokens)
        jobs.append(
            Job(
                **job_options,
                id=exchange.job_id(),
                card=card,
                generation=generation,
                prompt_tokens=prompt.tokens,
                max_tokens=max_tokens,
                hashes=prompt.hashes,
                choices=request.n or 1,
                adapter=model.adapter or "",
                explain=routing.explain and not jobs,
            )
        )
    return jobs


def tenant_of(exchange: HttpExchange) -> str:
    """Return the tenant of a request on the token path."""
    return exchange.tenant


def tenant_in(request: Request) -> str:
    """Return the tenant of a request that Starlette routes."""
    header = request.headers.get(TENANT_HEADER.decode(), "")
    return tenant_of_scope(request.scope, {TENANT_HEADER: header.encode("latin-1")})
