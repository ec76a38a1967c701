"""Makes the jobs of requests for pictures and for videos: checks the size, finds the model, turns the prompt into tokens."""

from __future__ import annotations

import re
from typing import Literal, Protocol

from headrace.broker.jobs import Job
from headrace.broker.messages import Picture, Pooling, PoolingInput
from headrace.frontend.auth.caller import check_model
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.job_options import RequestOptions, job_options_of
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.images.schema import LEAST_SIDE, MOST_SIDE, SIDE_STEP
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit
from headrace.frontend.settings import FrontendSettings

_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})", re.ASCII)


class PictureRequest(RequestOptions, Protocol):
    """The fields that requests for pictures and for videos share."""

    @property
    def prompt(self) -> str: ...
    @property
    def model(self) -> str | None: ...
    @property
    def size(self) -> str | None: ...
    @property
    def negative_prompt(self) -> str | None: ...
    @property
    def num_inference_steps(self) -> int | None: ...
    @property
    def guidance_scale(self) -> float | None: ...


class PictureJobs:
    """Makes the jobs of one kind of model. It keeps no state but the cache of loaded models."""

    def __init__(self, kind: Literal["image", "video"], model_cache: ModelCache, settings: FrontendSettings) -> None:
        self._kind = kind
        self._model_cache = model_cache
        self._settings = settings

    async def make(
        self, request: PictureRequest, exchange: HttpExchange, *, seed: int, n: int = 1, seconds: int | None = None
    ) -> Job:
        """Check a request and make its job, of `n` choices. Raises a FrontendError or an AdmissionError."""
        width, height = size_of(request.size)
        model = await self._model_cache.get(request.model)
        model.check_kind(self._kind)
        check_model(exchange.scope, model.card.model)
        limit = LengthLimit(context_length=model.card.context_length, wanted=1, truncate=None, param="prompt")
        prompt = await model.encoder.encode(request.prompt, add_special_tokens=True, limit=limit, salt=None)
        options, routing = job_options_of(request, exchange, self._settings, session_id=None)
        picture = Picture(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt or "",
            width=width,
            height=height,
            steps=request.num_inference_steps,
            guidance=request.guidance_scale,
            seed=seed,
            seconds=seconds,
        )
        return Job(
            **options,
            id=exchange.job_id(),
            card=model.card,
            pooling=Pooling(task=self._kind, inputs=[PoolingInput(prompt.packed)] * n, picture=picture),
            prompt_tokens=prompt.tokens * n,
            max_tokens=1,  # no token is generated, but 0 would mean a whole context
            choices=n,
            explain=routing.explain,
        )


def size_of(given: str | None) -> tuple[int | None, int | None]:
    """Return width and height; None is the model's own. Raises BadRequest."""
    if given is None or given == "auto":
        return None, None
    found = _SIZE.fullmatch(given)
    sides = [int(side) for side in found.groups()] if found is not None else []
    if not sides or any(not LEAST_SIDE <= side <= MOST_SIDE or side % SIDE_STEP for side in sides):
        raise BadRequest(
            f'size must be "auto" or WIDTHxHEIGHT, each a multiple of {SIDE_STEP} from {LEAST_SIDE} to {MOST_SIDE}, '
            f"got {given[:100]!r}",
            param="size",
        )
    return sides[0], sides[1]
