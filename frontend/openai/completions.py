"""Plans requests of `POST /v1/completions`: every prompt, a text or ids, becomes a job."""

from __future__ import annotations

from typing import cast

from headrace.frontend.chat_schema import DEFAULT_MAX_TOKENS, HINTS, CompletionRequest
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import GenerationOptions, Plan, plan_generation
from headrace.frontend.generation.request_checks import check_choices, refuse_unsupported
from headrace.frontend.generation.sse import COMPLETION_EVENTS
from headrace.frontend.http.bodies import ReportingDecoder, decode_request, kinds_of
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.http.field_checks import missing, unsupported
from headrace.frontend.openai.chat import answer_writer, whole_writer
from headrace.frontend.prompts import model_cache as prompt_embeds
from headrace.frontend.prompts.model_cache import LoadedModel, ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit, Prompt
from headrace.frontend.settings import FrontendSettings

_decoder = ReportingDecoder(CompletionRequest, HINTS)


class CompletionApi:
    """Plans completions requests. It keeps no state but the cache of loaded models."""

    def __init__(self, model_cache: ModelCache, settings: FrontendSettings) -> None:
        self._model_cache = model_cache
        self._settings = settings
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_decoder, body)
        _refuse(request)
        prompts, given = await list_prompts(request), prompt_embeds.listed(request)
        check_choices(request.n or 1, len(prompts) + len(given), self._settings)
        model = await self._model_cache.get(request.model)
        model.check_kind("completion")
        silent = request.max_tokens == 0  # an answer of the prompt alone; as in vLLM, one token is computed and dropped
        wanted = 1 if silent else DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        limit = LengthLimit(
            context_length=model.card.context_length, wanted=wanted, truncate=request.truncate_prompt_tokens, param="prompt"
        )
        encoded = [await prompt_embeds.prompt_of(text, model, limit, self._settings) for text in given]
        salt = exchange.salt(request.cache_salt)
        encoded += [await self._encode(prompt, request, model, limit, salt) for prompt in prompts]
        echo = []
        if request.echo:
            echo = [p if isinstance(p, str) else await model.encoder.text_of(e) for p, e in zip(prompts, encoded, strict=True)]
        options = GenerationOptions(
            id_prefix="cmpl-",
            prompts=encoded,
            wanted=wanted,
            top_logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs if not request.echo else _first(request.prompt_logprobs, request.logprobs),
            silent=silent,
        )
        plan = plan_generation(request, exchange, model, self._settings, options)
        writer = answer_writer(request, plan, COMPLETION_EVENTS, echo=echo)
        whole = whole_writer(request, plan, COMPLETION_EVENTS, echo=echo) if exchange.durable else None
        return plan.answered_by(writer, whole=whole)

    async def _encode(
        self, prompt: str | list[int], request: CompletionRequest, model: LoadedModel, limit: LengthLimit, salt: str | None
    ) -> Prompt:
        if isinstance(prompt, str):
            special = request.add_special_tokens is not False
            return await model.encoder.encode(prompt, add_special_tokens=special, limit=limit, salt=salt)
        return await model.encoder.take_ids(prompt, limit=limit, salt=salt)


def _refuse(request: CompletionRequest) -> None:
    refuse_unsupported(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "is not supported here: ask for n choices and take the best")
    if request.suffix:
        raise unsupported("suffix")
    if request.max_tokens == 0 and not request.echo:
        raise BadRequest("max_tokens must be at least 1 without echo", param="max_tokens")


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


async def list_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """Return a prompt in any of its four forms as a list of texts or ids. Raises BadRequest for a mixture."""
    prompt = request.prompt
    if not prompt and request.prompt_embeds:
        return []
    if prompt is None:
        raise missing("prompt")
    if isinstance(prompt, str):
        return [prompt]
    kinds = await kinds_of(prompt)
    if len(kinds) > 1:
        raise BadRequest("prompt must be a text, a list of texts, a list of ids or a list of lists of ids", param="prompt")
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    return cast("list[str | list[int]]", prompt)
