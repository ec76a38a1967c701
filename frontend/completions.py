"""`POST /v1/completions`: prompts as text or ids → one job each."""

from __future__ import annotations

from typing import cast

import msgspec

from broker.codec import unpack_u32
from frontend.decode import decode_body
from frontend.errors import BadRequest, FrontendError
from frontend.exchange import Exchange
from frontend.planning import Plan, Wishes, check_choices, check_kind, fit_of, make_draft, make_plan
from frontend.sampling import refuse_unsupported, unsupported
from frontend.schema.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from frontend.settings import FrontendSettings
from frontend.shelf import ModelShelf, ReadyModel
from frontend.sse import COMPLETION_EVENTS
from frontend.tokenize import Prompt

_decoder = msgspec.json.Decoder(CompletionRequest)


class CompletionApi:
    """Plans completions requests. Stateless but for the models it looks up."""

    def __init__(self, shelf: ModelShelf, settings: FrontendSettings) -> None:
        self._shelf = shelf
        self._settings = settings
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: Exchange) -> Plan:
        """Raises a FrontendError or an AdmissionError."""
        request = decode_body(_decoder, body)
        _refuse(request)
        prompts = list_prompts(request.prompt)
        check_choices(request.n or 1, len(prompts), self._settings)
        model = await self._shelf.get(request.model)
        check_kind(model, "completion")
        wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        encoded = [await self._encode(prompt, request, model, wanted) for prompt in prompts]
        echo = []
        if request.echo:
            echo = [
                p if isinstance(p, str) else model.encoder.decode(unpack_u32(e.packed))
                for p, e in zip(prompts, encoded, strict=True)
            ]
        wishes = Wishes(
            id_prefix="cmpl-",
            prompts=encoded,
            wanted=wanted,
            top_logprobs=request.logprobs,
        )
        draft = make_draft(request, exchange, model, self._settings, wishes)
        return make_plan(request, draft, wishes, COMPLETION_EVENTS, echo=echo)

    async def _encode(self, prompt: str | list[int], request: CompletionRequest, model: ReadyModel, wanted: int) -> Prompt:
        fit = fit_of(request, model, wanted=wanted, param="prompt")
        if isinstance(prompt, str):
            special = request.add_special_tokens is not False
            return await model.encoder.encode(prompt, add_special_tokens=special, fit=fit, salt=request.cache_salt)
        return await model.encoder.take_ids(prompt, fit=fit, salt=request.cache_salt)


def _refuse(request: CompletionRequest) -> None:
    refuse_unsupported(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of")
    if request.suffix:
        raise unsupported("suffix")
    if request.prompt_embeds is not None:
        raise unsupported("prompt_embeds")
    if request.echo and request.logprobs is not None:
        raise unsupported("logprobs", "together with echo is not supported here: prompts have no log probabilities")


def list_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The four forms a prompt may have, as a list of texts or ids. Raises BadRequest for a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise BadRequest("prompt must be a text, a list of texts, a list of ids or a list of lists of ids", param="prompt")
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    return cast("list[str | list[int]]", prompt)
