"""From a checked request to the jobs that answer it and the writer that shapes the answer: what all APIs share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from headrace.broker.codec import unpack_u32
from headrace.broker.jobs import Job
from headrace.broker.messages import Generation, Parsing
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.job_options import terms_of, tier_of
from headrace.frontend.generation.sampling import guided_of, sampling_of, stops_of
from headrace.frontend.http.http_exchange import DisconnectWatch, HttpExchange
from headrace.frontend.prompts.model_cache import LoadedModel
from headrace.frontend.prompts.prompt_encoder import LengthLimit, Prompt
from headrace.frontend.schema.chat import ChatRequest
from headrace.frontend.schema.common import GenerationRequest
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.writers.base import StreamWriter, WholeWriter
from headrace.frontend.writers.echo import EchoWriter
from headrace.frontend.writers.logprobs import LogprobWriter
from headrace.frontend.writers.parsed import ParsedWriter
from headrace.frontend.writers.sse import AnswerOptions, EventForm, EventWriter, Head
from headrace.frontend.writers.unary import UnaryWriter
from headrace.frontend.writers.usage import UsageCounter

Detached = Callable[[HttpExchange, DisconnectWatch], Awaitable[None]]


class Plan(msgspec.Struct, frozen=True):
    """What to run, and what turns its rows into an answer: a stream exactly when the client asked for one."""

    jobs: list[Job]
    writer: StreamWriter | WholeWriter
    tally: UsageCounter
    detached: Detached | None = None  # runs it apart from this connection and answers; the writer is not used here then


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A plan whose answer has no shape yet. `choices` counts those of all jobs."""

    jobs: list[Job]
    head: Head
    tally: UsageCounter
    model: LoadedModel
    choices: int


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the request asks for, in the terms all APIs share. `top_logprobs` None = no log probabilities at all."""

    id_prefix: str
    prompts: Sequence[Prompt]
    wanted: int | None  # tokens per choice; None = as many as fit
    top_logprobs: int | None = None
    parse: Parsing | None = None
    prompt_logprobs: int | None = None  # alternatives per prompt token; None = none are told
    role: str = "assistant"  # of the answer
    prompt_text: str | None = None  # to be told to the client
    silent: bool = False  # nothing is to be said beyond the prompt


class Drafts(Protocol):
    """What APIs that speak in messages need of the chat API."""

    async def draft(self, request: ChatRequest, exchange: HttpExchange, *, id_prefix: str) -> tuple[Draft, GenerationOptions]:
        """Raises a FrontendError or an AdmissionError."""


def fit_of(request: GenerationRequest, model: LoadedModel, *, wanted: int | None, param: str) -> LengthLimit:
    """How long the prompt may be; `param` is the parameter to blame."""
    return LengthLimit(
        context_length=model.card.context_length, wanted=wanted, truncate=request.truncate_prompt_tokens, param=param
    )


def check_kind(model: LoadedModel, kind: str) -> None:
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
    request: GenerationRequest,
    exchange: HttpExchange,
    model: LoadedModel,
    settings: FrontendSettings,
    wishes: GenerationOptions,
) -> Draft:
    """Raises BadRequest."""
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")
    n = request.n or 1
    jobs = _jobs(request, exchange, model, settings, wishes)
    tier = tier_of(request.service_tier).name if request.service_tier is not None else None
    name = f"{wishes.id_prefix}{request.request_id or jobs[0].id}"
    head = Head(name, int(time.time()), model.name, model.fingerprint, tier)
    reasoning = wishes.parse is not None and model.card.reasoning_parser is not None
    tally = UsageCounter([p.tokens for p in wishes.prompts], n, reasoning=reasoning)
    return Draft(jobs=jobs, head=head, tally=tally, model=model, choices=n * len(jobs))


def make_plan(
    request: GenerationRequest, draft: Draft, wishes: GenerationOptions, form: EventForm, *, echo: Sequence[str] = ()
) -> Plan:
    """The answer of chat and completions. `echo` has one text per prompt, or is empty."""
    n, total = request.n or 1, draft.choices
    per_choice = [i // n for i in range(total)]
    logprobs, token_ids = None, bool(request.return_token_ids)
    if wishes.top_logprobs is not None:
        logprobs = LogprobWriter(wishes.top_logprobs, choices=total, as_ids=bool(request.return_tokens_as_token_ids))
    if wishes.parse is not None and not wishes.parse.reasoning:  # tokens would give away what is not to be handed out
        logprobs, token_ids = None, False
    prompt_ids = [unpack_u32(p.packed) for p in wishes.prompts] if request.return_token_ids else []
    echo_first: list[tuple[int, str]] = []
    if echo and logprobs is not None and not form.chat:
        first_ids = [unpack_u32(p.packed[:4]) for p in wishes.prompts]
        echo_first = [(ids[0], draft.model.encoder.decode(ids)) for ids in first_ids]
    streamed = request.stream_options
    usage = bool(streamed and streamed.include_usage)
    options = AnswerOptions(
        usage=usage,
        usage_always=bool(usage and streamed and streamed.continuous_usage_stats),
        token_ids=token_ids,
        logprobs=logprobs,
        role=wishes.role,
        parse=wishes.parse,
        echo=[echo[p] for p in per_choice] if echo else (),
        echo_first=[echo_first[p] for p in per_choice] if echo_first else (),
        prompt_ids=[prompt_ids[p] for p in per_choice] if prompt_ids else (),
        prompt_text=wishes.prompt_text,
        prompt_logprobs=wishes.prompt_logprobs is not None,
        silent=wishes.silent,
    )
    writer: StreamWriter | WholeWriter
    if not request.stream:
        writer = UnaryWriter(draft.head, draft.tally, choices=total, chat=form.chat, options=options)
    else:
        kind = ParsedWriter if wishes.parse is not None else EchoWriter if echo_first or wishes.silent else EventWriter
        writer = kind(form, draft.head, draft.tally, choices=total, options=options)
    return Plan(draft.jobs, writer, draft.tally)


def _jobs(
    request: GenerationRequest,
    exchange: HttpExchange,
    model: LoadedModel,
    settings: FrontendSettings,
    wishes: GenerationOptions,
) -> list[Job]:
    card = model.card
    stop = stops_of(request)
    guided = guided_of(request)
    terms, routing = terms_of(request, exchange, settings, session_id=request.session_id)
    extra = dict(request.vllm_xargs or {})
    if request.thinking_token_budget is not None and request.thinking_token_budget >= 0:
        extra["thinking_token_budget"] = request.thinking_token_budget
    jobs: list[Job] = []
    for prompt in wishes.prompts:
        room = card.context_length - prompt.tokens
        max_tokens = min(room, wishes.wanted if wishes.wanted is not None else card.default_max_tokens or room)
        generation = Generation(
            token_ids=prompt.packed,
            sampling=sampling_of(request, card, max_tokens=max_tokens),
            stop=stop,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            logprobs=wishes.top_logprobs,
            prompt_logprobs=wishes.prompt_logprobs,
            guided=guided,
            adapter=model.adapter,
            cache_salt=request.cache_salt,
            session_id=routing.session or None,
            prompt_embeds=prompt.embeds or None,
            media=list(prompt.media),
            extra=extra,
            parse=wishes.parse,
        )
        jobs.append(
            Job(
                **terms,
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
