"""`POST /inference/v1/generate`, token ids in and token ids out, as in vLLM's server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.broker.jobs import plain
from headrace.broker.messages.frames import Finish, Row, TokenLogprob
from headrace.frontend.answer_schema import UNSET, ChatLogprobs, PromptLogprobs, UnsetType, Usage
from headrace.frontend.chat_schema import (
    MAX_LOGPROBS,
    GenerationRequest,
    Int64,
    Penalty,
    Positive,
    StreamOptions,
    StructuredOutputs,
    TokenId,
)
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import GenerationOptions, GenerationPlan, Plan, plan_generation
from headrace.frontend.generation.request_checks import check_choices, refuse_unsupported
from headrace.frontend.generation.sse import (
    DONE,
    FLOOR,
    Head,
    LogprobWriter,
    StreamWriter,
    UsageCounter,
    WholeWriter,
    prompt_logprobs,
)
from headrace.frontend.http.bodies import ReportingDecoder, decode_request, model_name, unsupported
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.ports import Models
from headrace.frontend.prompts.model_cache import LoadedModel, ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit
from headrace.frontend.settings import FrontendSettings

OutputMode = Literal["tokens", "text"]


class TokenSampling(msgspec.Struct, kw_only=True):
    """The sampling parameters. `None` means: not given, which is vLLM's default and not that of the model."""

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Positive | None = None  # None = the model's default, or as many as fit
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    extra_args: dict[str, Any] | None = None
    # refused by name, if they ask for something
    logprob_token_ids: list[int] | None = None
    prompt_logprob_token_ids: list[Any] | None = None
    prompt_logprob_start: int | None = None
    repetition_detection: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    trace_decode_token_ids: list[int] | None = None
    watermarking: bool | None = None


class TokenGenerationRequest(msgspec.Struct, kw_only=True):
    """Token ids to continue. Without `model` the only served model is used. `output_mode` text adds the text."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: TokenSampling
    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    request_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/+=-]{1,128}$")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: OutputMode = "tokens"
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    token_offsets: list[Any] | None = None  # without effect: they say where the ids came from
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    features: dict[str, Any] | None = None
    content_parts: list[dict[str, Any]] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


class CandidateToken(msgspec.Struct, kw_only=True):
    """A token that could stand at a position. `rank` 1 is the likeliest; null = not among the alternatives."""

    token_id: int
    logprob: float
    rank: int | None = None


class SampledToken(CandidateToken, kw_only=True):
    """The token at a position with its alternatives: itself first, then the likeliest ones."""

    top_logprobs: list[CandidateToken]


class TokenLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a choice by token ids, one entry per token."""

    content: list[SampledToken]


class BaseChoice(msgspec.Struct, kw_only=True):
    """The fields of a choice in both modes, also of what a streamed event adds to it. The last three are never given."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int]
    routed_experts: None = None
    sampling_mask: None = None
    weight_versions: None = None


class TokenChoice(BaseChoice, kw_only=True):
    """A choice of `output_mode` tokens."""

    logprobs: TokenLogprobs | None = None


class TextChoice(BaseChoice, kw_only=True):
    """A choice of `output_mode` text."""

    text: str
    logprobs: ChatLogprobs | None = None


class BaseAnswer(msgspec.Struct, kw_only=True):
    """The fields of an answer in both modes. The last five are never given."""

    request_id: str
    model: str
    created: int
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_token_id_logprobs: None = None
    mm_placeholders: None = None
    metrics: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


class TokenGenerationAnswer(BaseAnswer, kw_only=True, tag_field="output_mode", tag="tokens"):
    """The answer of `POST /inference/v1/generate`."""

    choices: list[TokenChoice]


class TextGenerationAnswer(BaseAnswer, kw_only=True, tag_field="output_mode", tag="text"):
    """The answer of `POST /inference/v1/generate` with `output_mode` text."""

    choices: list[TextChoice]


class TokenGenerationEvent(msgspec.Struct, kw_only=True):
    """An event of a stream of token ids. The first one has the ids of the prompt, if they were asked for."""

    request_id: str
    output_mode: OutputMode
    choices: list[TokenChoice] | list[TextChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode


class TokenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an answer. `logprobs` is the number of alternatives, `prompt_ids` the prompt if it is to be given back."""

    mode: OutputMode
    choices: int
    logprobs: int | None = None
    prompt_ids: list[int] | None = None
    usage: bool = False  # one more event at the end
    usage_always: bool = False  # in every event


class TokenForm:
    """Makes choices out of rows, in one of the two output modes."""

    def __init__(self, options: TokenOptions) -> None:
        self._top = options.logprobs
        self._named = LogprobWriter(options.logprobs or 0, choices=options.choices)

    def tokens(self, index: int, ids: list[int], items: Sequence[TokenLogprob], fin: Finish | None) -> TokenChoice:
        logprobs = None
        if self._top is not None:
            logprobs = TokenLogprobs(content=[_sampled(item, max(self._top, 1)) for item in items])
        reason, stop = _ending(fin)
        return TokenChoice(index=index, logprobs=logprobs, finish_reason=reason, stop_reason=stop, token_ids=ids)

    def text(self, index: int, ids: list[int], text: str, items: Sequence[TokenLogprob], fin: Finish | None) -> TextChoice:
        logprobs = self._named.chat(items) if self._top is not None else None
        reason, stop = _ending(fin)
        return TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason, stop_reason=stop, token_ids=ids)


def _ending(fin: Finish | None) -> tuple[str | None, int | str | None]:
    return (fin.reason, fin.stop) if fin is not None else (None, None)


def _sampled(item: TokenLogprob, most: int) -> SampledToken:
    ranked = [
        CandidateToken(token_id=token, logprob=max(value, FLOOR), rank=i) for i, (token, _, value) in enumerate(item.top, 1)
    ]
    rank = next((other.rank for other in ranked if other.token_id == item.id), None)
    itself = CandidateToken(token_id=item.id, logprob=max(item.logprob, FLOOR), rank=rank)
    others = [other for other in ranked if other.token_id != item.id]
    top = [itself, *others][:most]
    return SampledToken(token_id=item.id, logprob=itself.logprob, rank=rank, top_logprobs=top)


def _text_of(row: Row) -> str:
    return plain(row.texts if row.fin is None or not row.fin.tail else [*row.texts, row.fin.tail])


@dataclass(slots=True)
class _Choice:
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    fin: Finish | None = None


class TokenWriter(WholeWriter):
    def __init__(self, head: Head, counter: UsageCounter, options: TokenOptions) -> None:
        self.open = options.choices
        self._head = head
        self._counter = counter
        self._options = options
        self._form = TokenForm(options)
        self._choices = [_Choice() for _ in range(options.choices)]

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            choice = self._choices[row.choice]
            choice.ids += row.ids
            choice.texts.append(_text_of(row))
            choice.logprobs += row.logprobs or ()
            self._counter.completion += len(row.ids)
            if (fin := row.fin) is not None:
                choice.fin = fin
                self.open -= 1
                self._counter.end(row.choice, fin)

    def body(self) -> bytes:
        head, form = self._head, self._form
        first = self._choices[0].fin
        scored = first.prompt_logprobs if first is not None else None
        common: dict[str, Any] = {
            "request_id": head.id,
            "model": head.model,
            "created": head.created,
            "usage": self._counter.usage(),
            "prompt_logprobs": prompt_logprobs(scored) if scored is not None else None,
            "prompt_token_ids": self._options.prompt_ids,
        }
        each = enumerate(self._choices)
        if self._options.mode == "text":
            texts = [form.text(i, c.ids, "".join(c.texts), c.logprobs, c.fin) for i, c in each]
            return _encode(TextGenerationAnswer(choices=texts, **common))
        return _encode(TokenGenerationAnswer(choices=[form.tokens(i, c.ids, c.logprobs, c.fin) for i, c in each], **common))


class TokenEvents(StreamWriter):
    """Writes the events of a streamed answer: one for each row with ids, text or an end."""

    def __init__(self, head: Head, counter: UsageCounter, options: TokenOptions) -> None:
        self.open = options.choices
        self._id = head.id
        self._counter = counter
        self._options = options
        self._form = TokenForm(options)
        self._prompt_ids = options.prompt_ids

    def events(self, rows: list[Row]) -> bytes:
        return b"".join(self._event(row) for row in rows)

    def closing(self) -> bytes:
        if not self._options.usage:
            return DONE
        last = TokenGenerationEvent(
            request_id=self._id, output_mode=self._options.mode, choices=[], usage=self._counter.usage()
        )
        return _data(last) + DONE

    def failure(self, error: FrontendError) -> bytes:
        """Return the error event. No [DONE] follows, because the answer is not complete."""
        return b"data: " + error.body() + b"\n\n"

    def _event(self, row: Row) -> bytes:
        fin, text = row.fin, _text_of(row)
        self._counter.completion += len(row.ids)
        if fin is not None:
            self.open -= 1
            self._counter.end(row.choice, fin)
        elif not row.ids and (not text or self._options.mode == "tokens"):
            return b""
        form, items = self._form, row.logprobs or ()
        event = TokenGenerationEvent(
            request_id=self._id,
            output_mode=self._options.mode,
            choices=[form.text(row.choice, row.ids, text, items, fin)]
            if self._options.mode == "text"
            else [form.tokens(row.choice, row.ids, items, fin)],
            usage=self._counter.usage() if self._options.usage_always else None,
        )
        if self._prompt_ids is not None:
            event.prompt_token_ids, self._prompt_ids = self._prompt_ids, None
        return _data(event)


def _data(event: TokenGenerationEvent) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"


PATH = "/inference/v1/generate"

REFUSED = {
    "features": "is not supported here: media come with /v1/chat/completions",
    "content_parts": "is not supported here: media come with /v1/chat/completions",
    "kv_transfer_params": "cannot be sent with a request: workers hand over by themselves",
    "ec_transfer_params": "cannot be sent with a request: workers hand over by themselves",
}
REFUSED_SAMPLING = {
    "logprob_token_ids": "is not supported here: use logprobs",
    "prompt_logprob_token_ids": "is not supported here: use prompt_logprobs",
    "prompt_logprob_start": "is not supported here: use prompt_logprobs",
    "repetition_detection": "is not supported here",
    "skip_reading_prefix_cache": "is not supported here: use cache_salt",
    "trace_decode_token_ids": "is not supported here",
    "watermarking": "is not supported here",
}
"""Parameters of vLLM's server that are refused, and why."""

Number = TypeVar("Number", int, float)

_decoder = ReportingDecoder(TokenGenerationRequest)


class TokenGenerationApi:
    """Plans requests in token ids. It keeps no state but the cache of loaded models."""

    def __init__(self, model_cache: ModelCache, models: Models, settings: FrontendSettings) -> None:
        self._model_cache = model_cache
        self._models = models
        self._settings = settings
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_decoder, body)
        sampling = request.sampling_params
        _refuse(request)
        model = await self._model_cache.get(model_name(request.model, self._models))
        model.check_kind("completion")
        generation = _generation(request, model.name, exchange.name)
        try:
            plan = await self._plan(request, generation, model, exchange)
        except BadRequest as error:
            if (error.param or "").partition(".")[0] in TokenSampling.__struct_fields__:
                error.param = f"sampling_params.{error.param}"
            raise
        stream_options = request.stream_options
        usage = bool(stream_options and stream_options.include_usage)
        options = TokenOptions(
            mode=request.output_mode,
            choices=plan.choices,
            logprobs=sampling.logprobs,
            prompt_ids=request.token_ids if request.return_token_ids else None,
            usage=usage,
            usage_always=bool(usage and stream_options and stream_options.continuous_usage_stats),
        )
        kind = TokenEvents if request.stream else TokenWriter
        return plan.answered_by(kind(plan.head, plan.counter, options))

    async def _plan(
        self, request: TokenGenerationRequest, generation: GenerationRequest, model: LoadedModel, exchange: HttpExchange
    ) -> GenerationPlan:
        refuse_unsupported(generation)
        check_choices(generation.n or 1, 1, self._settings)
        wanted = generation.max_tokens
        limit = LengthLimit(context_length=model.card.context_length, wanted=wanted, truncate=None, param="token_ids")
        prompt = await model.encoder.take_ids(request.token_ids, limit=limit, salt=exchange.salt(request.cache_salt))
        options = GenerationOptions(
            id_prefix="generate-tokens-",
            prompts=[prompt],
            wanted=wanted,
            top_logprobs=request.sampling_params.logprobs,
            prompt_logprobs=generation.prompt_logprobs,
        )
        return plan_generation(generation, exchange, model, self._settings, options)


def _refuse(request: TokenGenerationRequest) -> None:
    sampling = request.sampling_params
    for param, why in REFUSED.items():
        if getattr(request, param):
            raise unsupported(param, why)
    for param, why in REFUSED_SAMPLING.items():
        if getattr(sampling, param) not in (None, False, [], {}):
            raise unsupported(f"sampling_params.{param}", why)
    if sampling.structured_outputs is not None:
        for param in ("reasoning_ended", "reasoning_parser_kwargs"):
            if getattr(request, param):
                raise unsupported(param, "is not supported here together with structured_outputs")
    if sampling.detokenize is False:
        if request.output_mode == "text":
            raise BadRequest("output_mode text needs sampling_params.detokenize to be true", param="output_mode")
        if sampling.stop:
            raise BadRequest("stop strings need sampling_params.detokenize to be true", param="sampling_params.stop")


def _generation(request: TokenGenerationRequest, model: str, client_id: str) -> GenerationRequest:
    """Return the request in the terms of all generating APIs, with vLLM's defaults of sampling in place of the model's."""
    given = request.sampling_params
    return GenerationRequest(
        model=model,
        n=given.n,
        max_tokens=given.max_tokens,
        min_tokens=given.min_tokens,
        temperature=_given(given.temperature, 1.0),
        top_p=_given(given.top_p, 1.0),
        top_k=_given(given.top_k, 0),
        min_p=_given(given.min_p, 0.0),
        presence_penalty=_given(given.presence_penalty, 0.0),
        frequency_penalty=_given(given.frequency_penalty, 0.0),
        repetition_penalty=_given(given.repetition_penalty, 1.0),
        seed=given.seed,
        logit_bias=given.logit_bias,
        allowed_token_ids=given.allowed_token_ids,
        bad_words=given.bad_words,
        stop=given.stop or None,
        stop_token_ids=given.stop_token_ids,
        include_stop_str_in_output=given.include_stop_str_in_output,
        ignore_eos=given.ignore_eos,
        skip_special_tokens=given.skip_special_tokens,
        spaces_between_special_tokens=given.spaces_between_special_tokens,
        prompt_logprobs=given.prompt_logprobs,
        structured_outputs=given.structured_outputs,
        thinking_token_budget=given.thinking_token_budget,
        vllm_xargs=given.extra_args,
        stream=request.stream,
        stream_options=request.stream_options,
        cache_salt=request.cache_salt,
        priority=request.priority,
        request_id=client_id or request.request_id,
    )


def _given(value: Number | None, default: Number) -> Number:
    return default if value is None else value
