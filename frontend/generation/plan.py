"""Turns a checked generation request and its encoded prompts into jobs: the planning step that all generating APIs share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from headrace.broker.durable.names import job_of_run
from headrace.broker.jobs import Job
from headrace.broker.messages import Generation, Parsing
from headrace.frontend.auth.caller import check_model
from headrace.frontend.generation.job_options import job_options_of, tier_of
from headrace.frontend.generation.request_size import check_size
from headrace.frontend.generation.sampling import guided_of, sampling_of, stops_of
from headrace.frontend.http.http_exchange import DisconnectWatch, HttpExchange
from headrace.frontend.prompts.model_cache import LoadedModel
from headrace.frontend.prompts.prompt_encoder import Prompt
from headrace.frontend.schema.common import GenerationRequest
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.writers.base import StreamWriter, WholeWriter
from headrace.frontend.writers.sse import Head
from headrace.frontend.writers.usage import UsageCounter

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
