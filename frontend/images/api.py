"""Plans requests of `POST /v1/images/generations`: a prompt becomes a job, and each of its pictures a choice of it."""

from __future__ import annotations

import re
import secrets

import msgspec

from headrace.broker.jobs import Job
from headrace.broker.messages import Picture, Pooling, PoolingInput
from headrace.frontend.auth.caller import check_model
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.job_options import job_options_of
from headrace.frontend.generation.plan import Plan
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.images.schema import LEAST_SIDE, MOST_SIDE, SIDE_STEP, ImageRequest
from headrace.frontend.images.writer import ImageWriter, Results
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.writers.usage import UsageCounter

PATH = "/v1/images/generations"

_decoder = msgspec.json.Decoder(ImageRequest)
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})", re.ASCII)

_TAKEN: dict[str, tuple[str, ...]] = {
    "response_format": ("b64_json",),
    "output_format": ("png",),
    "quality": ("auto", "standard"),
    "background": ("auto", "opaque"),
}
"""Parameters with the values that are taken; all others are refused by name."""


class ImageApi:
    """Plans pictures. It keeps no state but the cache of loaded models."""

    def __init__(self, model_cache: ModelCache, settings: FrontendSettings, results: Results | None) -> None:
        self._model_cache = model_cache
        self._settings = settings
        self._results = results
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
        request = await decode_request(_decoder, body)
        _refuse(request)
        width, height = size_of(request.size)
        model = await self._model_cache.get(request.model)
        model.check_kind("image")
        check_model(exchange.scope, model.card.model)
        limit = LengthLimit(context_length=model.card.context_length, wanted=1, truncate=None, param="prompt")
        prompt = await model.encoder.encode(request.prompt, add_special_tokens=True, limit=limit, salt=None)
        n = request.n or 1
        options, routing = job_options_of(request, exchange, self._settings, session_id=None)
        picture = Picture(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt or "",
            width=width,
            height=height,
            steps=request.num_inference_steps,
            guidance=request.guidance_scale,
            # Chosen here, so that a picture that has to be made again is the same one.
            seed=secrets.randbits(31) if request.seed is None else request.seed,
        )
        job = Job(
            **options,
            id=exchange.job_id(),
            card=model.card,
            pooling=Pooling(task="image", inputs=[PoolingInput(prompt.packed)] * n, picture=picture),
            prompt_tokens=prompt.tokens * n,
            max_tokens=1,  # no token is generated, but 0 would mean a whole context
            choices=n,
            explain=routing.explain,
        )
        counter = UsageCounter([prompt.tokens] * n, 1)
        return Plan([job], ImageWriter(exchange.created, n, counter, self._results), counter)


def _refuse(request: ImageRequest) -> None:
    for param, taken in _TAKEN.items():
        value = getattr(request, param)
        if value is not None and value not in taken:
            raise unsupported(param, f"{value[:100]!r} is not supported here: {' and '.join(taken)} are")
    if request.stream:
        raise unsupported("stream", "is not supported here: pictures come when they are done")
    for param in ("partial_images", "style", "output_compression"):
        if getattr(request, param):
            raise unsupported(param)


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
