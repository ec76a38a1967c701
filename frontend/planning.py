"""From a checked request to the jobs that answer it and the writer that shapes the answer: what all APIs share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from broker.codec import unpack_u32
from broker.jobs import Job
from broker.messages import Generation, Parsing
from frontend.collect import Collector
from frontend.errors import BadRequest
from frontend.exchange import Exchange
from frontend.logprobs import LogprobWriter
from frontend.routing import routing_of
from frontend.sampling import guided_of, sampling_of, stops_of
from frontend.schema.common import GenerationRequest
from frontend.settings import FrontendSettings
from frontend.shelf import ReadyModel
from frontend.sse import EventForm, EventOptions, EventWriter, Head
from frontend.tokenize import Fit, Prompt
from frontend.usage import Tally
from frontend.writing import StreamWriter, WholeWriter
from jetstream.subjects import tenant_token

TENANT_HEADER = b"x-headrace-tenant"
TIMEOUT_HEADER = b"x-request-timeout-s"
URGENT_TIERS = frozenset({"priority"})


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, and what turns its rows into an answer: a stream exactly when the client asked for one."""

    jobs: list[Job]
    writer: StreamWriter | WholeWriter
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan whose answer has no shape yet. `choices` counts those of all jobs."""

    jobs: list[Job]
    head: Head
    tally: Tally
    model: ReadyModel
    choices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the request asks for, in the terms all APIs share. `top_logprobs` None = no log probabilities at all."""

    id_prefix: str
    prompts: Sequence[Prompt]
    wanted: int | None  # tokens per choice; None = as many as fit
    top_logprobs: int | None = None
    parse: Parsing | None = None


def fit_of(request: GenerationRequest, model: ReadyModel, *, wanted: int | None, param: str) -> Fit:
    """How long the prompt may be; `param` is the parameter to blame."""
    return Fit(context_length=model.card.context_length, wanted=wanted, truncate=request.truncate_prompt_tokens, param=param)


def check_kind(model: ReadyModel, kind: str) -> None:
    """Raises BadRequest when the model is not for this kind of request."""
    if kind not in model.card.kinds:
        served = ", ".join(model.card.kinds)
        raise BadRequest(
            f"{model.card.model!r} does not serve {kind} requests, only: {served}", param="model", code="wrong_kind"
        )


def check_choices(n: int, prompts: int, settings: FrontendSettings) -> None:
    """Raises BadRequest when one request wants too many answers."""
    if n * prompts > settings.max_choices:
        param = "n" if n > 1 else "prompt"
        raise BadRequest(f"at most {settings.max_choices} choices in one request, this one asks for {n * prompts}", param=param)


def make_draft(
    request: GenerationRequest, exchange: Exchange, model: ReadyModel, settings: FrontendSettings, wishes: Wishes
) -> Draft:
    """Raises BadRequest."""
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")
    n = request.n or 1
    jobs = _jobs(request, exchange, model, settings, wishes)
    head = Head(f"{wishes.id_prefix}{jobs[0].id}", int(time.time()), model.card.model, model.fingerprint)
    tally = Tally([p.tokens for p in wishes.prompts], n)
    return Draft(jobs=jobs, head=head, tally=tally, model=model, choices=n * len(jobs))


def make_plan(request: GenerationRequest, draft: Draft, wishes: Wishes, form: EventForm, *, echo: Sequence[str] = ()) -> Plan:
    """The answer of chat and completions. `echo` has one text per prompt, or is empty."""
    n, total = request.n or 1, draft.choices
    per_choice = [i // n for i in range(total)]
    echoes = [echo[p] for p in per_choice] if echo else []
    prompt_ids = []
    if request.return_token_ids:
        unpacked = [unpack_u32(p.packed) for p in wishes.prompts]
        prompt_ids = [unpacked[p] for p in per_choice]
    logprobs = None
    if wishes.top_logprobs is not None:
        as_ids = bool(request.return_tokens_as_token_ids)
        logprobs = LogprobWriter(wishes.top_logprobs, choices=total, as_ids=as_ids, start=[len(e) for e in echoes])
    token_ids = bool(request.return_token_ids)
    writer: StreamWriter | WholeWriter
    if request.stream:
        wanted = request.stream_options
        usage = bool(wanted and wanted.include_usage)
        options = EventOptions(
            usage=usage,
            usage_always=bool(usage and wanted and wanted.continuous_usage_stats),
            token_ids=token_ids,
            logprobs=logprobs,
        )
        writer = EventWriter(form, draft.head, draft.tally, choices=total, options=options, echo=echoes, prompt_ids=prompt_ids)
    else:
        writer = Collector(
            draft.head,
            draft.tally,
            choices=total,
            chat=form.chat,
            logprobs=logprobs,
            token_ids=token_ids,
            echo=echoes,
            prompt_ids=prompt_ids,
        )
    return Plan(draft.jobs, writer, draft.tally)


def _jobs(
    request: GenerationRequest, exchange: Exchange, model: ReadyModel, settings: FrontendSettings, wishes: Wishes
) -> list[Job]:
    card = model.card
    stop = stops_of(request)
    guided = guided_of(request)
    tenant = tenant_token(exchange.header(TENANT_HEADER) or "")
    deadline_s = _deadline(request, exchange, settings)
    urgent = request.service_tier in URGENT_TIERS
    routing = routing_of(exchange, session_id=request.session_id)
    jobs: list[Job] = []
    for prompt in wishes.prompts:
        room = card.context_length - prompt.tokens
        max_tokens = wishes.wanted if wishes.wanted is not None else min(room, card.default_max_tokens or room)
        generation = Generation(
            token_ids=prompt.packed,
            sampling=sampling_of(request, card, max_tokens=max_tokens),
            stop=stop,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            logprobs=wishes.top_logprobs,
            guided=guided,
            cache_salt=request.cache_salt,
            session_id=routing.session or None,
            extra=request.vllm_xargs or {},
            parse=wishes.parse,
        )
        jobs.append(
            Job(
                id=exchange.job_id(),
                card=card,
                generation=generation,
                prompt_tokens=prompt.tokens,
                max_tokens=max_tokens,
                hashes=prompt.hashes,
                choices=request.n or 1,
                request_class="hi" if urgent else "std",
                tenant=tenant,
                priority=request.priority or 0,
                deadline_s=deadline_s,
                session=routing.session,
                affinity=routing.affinity,
                worker=routing.worker,
                require=routing.require,
                prefer=routing.prefer,
                explain=routing.explain and not jobs,
            )
        )
    return jobs


def _deadline(request: GenerationRequest, exchange: Exchange, settings: FrontendSettings) -> float:
    asked = exchange.header(TIMEOUT_HEADER)
    wanted = request.timeout
    if asked is not None:
        name = TIMEOUT_HEADER.decode()
        try:
            wanted = float(asked)
        except ValueError:
            raise BadRequest(f"{name} must be a number of seconds, got {asked!r}", param=name) from None
        if not 0 < wanted < float("inf"):
            raise BadRequest(f"{name} must be above 0, got {asked}", param=name)
    return min(wanted, settings.max_deadline_s) if wanted is not None else settings.deadline_s
