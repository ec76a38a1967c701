"""Plans requests of `POST /v1/images/generations`: a prompt becomes a job, and each of its pictures a choice of it."""

from __future__ import annotations

import secrets

import msgspec

from headrace.frontend.errors import FrontendError
from headrace.frontend.generation.plan import Plan
from headrace.frontend.http.body_decoding import decode_request
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.images.picture_jobs import PictureJobs
from headrace.frontend.images.schema import ImageRequest
from headrace.frontend.images.writer import ImageWriter, Results
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.writers.usage import UsageCounter

PATH = "/v1/images/generations"

_decoder = msgspec.json.Decoder(ImageRequest)

_TAKEN: dict[str, tuple[str, ...]] = {
    "response_format": ("b64_json",),
    "output_format": ("png",),
    "quality": ("auto", "standard"),
    "background": ("auto", "opaque"),
}
"""Parameters with the values that are taken; all others are refused by name."""


class ImageApi:
    """Plans pictures."""

    def __init__(self, model_cache: ModelCache, settings: FrontendSettings, results: Results | None) -> None:
        self._jobs = PictureJobs("image", model_cache, settings)
        self._results = results
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode a body and plan its answer. Raises a FrontendError or an AdmissionError."""
        request = await decode_request(_decoder, body)
        _refuse(request)
        n = request.n or 1
        # Chosen here, so that a picture that has to be made again is the same one.
        seed = secrets.randbits(31) if request.seed is None else request.seed
        job = await self._jobs.make(request, exchange, seed=seed, n=n)
        counter = UsageCounter([job.prompt_tokens // n] * n, 1)
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
