"""Plans requests of `POST /inference/v1/generate`: token ids in, token ids out, for clients that template and tokenise."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import GenerationOptions, GenerationPlan, Plan, plan_generation
from headrace.frontend.generation.request_checks import check_choices, refuse_unsupported
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.field_checks import model_name, unsupported
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.ports import Models
from headrace.frontend.prompts.model_cache import LoadedModel, ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit
from headrace.frontend.schema.common import GenerationRequest
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.tokens.generation_schema import TokenGenerationRequest, TokenSampling
from headrace.frontend.tokens.generation_writers import TokenEvents, TokenOptions, TokenWriter

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

_decoder = msgspec.json.Decoder(TokenGenerationRequest)


class TokenGenerationApi:
    """Plans requests in token ids. It keeps no state but the cache of loaded models."""

    def __init__(self, model_cache: ModelCache, models: Models, settings: FrontendSettings) -> None:
        self._model_cache = model_cache
        self._models = models
        self._settings = settings
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
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
