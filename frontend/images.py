"""Serves `POST /v1/images/generations`: a prompt becomes a job, and each of its pictures a choice of it."""

from __future__ import annotations

import asyncio
import binascii
import re
import secrets
import struct
from typing import Annotated, Any, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta

from headrace.broker.errors import BrokerError
from headrace.broker.jobs import Job
from headrace.broker.messages.frames import Finish, Row
from headrace.broker.messages.requests import Picture, Pooling, PoolingInput
from headrace.broker.spill import ResultObjects
from headrace.frontend.apis import HttpApi, Site
from headrace.frontend.auth.caller import check_model
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.job_options import RequestOptions, job_options_of
from headrace.frontend.generation.plan import Plan
from headrace.frontend.generation.sse import UsageCounter, WholeWriter
from headrace.frontend.http.bodies import ReportingDecoder, decode_request, unsupported
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.openapi import all_errors, json_answer, json_body, operation
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit
from headrace.frontend.settings import FrontendSettings

MOST_PICTURES = 10  # of a request, as with OpenAI
LEAST_SIDE, MOST_SIDE, SIDE_STEP = 64, 4096, 8  # pixels


class ImageRequest(msgspec.Struct, kw_only=True):
    """A request. `None` always means: not given."""

    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None  # None = the only one that is served
    n: Annotated[int, Meta(ge=1, le=MOST_PICTURES)] | None = None
    size: str | None = None  # "512x768", or "auto"
    response_format: str | None = None
    output_format: str | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    quality: str | None = None
    background: str | None = None
    style: str | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    moderation: str | None = None  # checked, without effect, as is `user`
    user: str | None = None
    # Beyond OpenAI's:
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None  # of the first picture, and one more for each other
    negative_prompt: Annotated[str, Meta(max_length=32_000)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    service_tier: str | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None  # seconds


class ImageData(msgspec.Struct, kw_only=True):
    """A picture: a PNG file in base64."""

    b64_json: str


class ImageAnswer(msgspec.Struct, kw_only=True):
    """The pictures of a request. `size` is that of all of them."""

    created: int
    data: list[ImageData]
    output_format: str = "png"
    size: str


SCHEMAS: tuple[Any, ...] = (ImageRequest, ImageAnswer)


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


async def file_of(end: Finish, results: ResultObjects | None) -> bytes:
    """Return the picture or video of a finished choice. Raises BrokerError."""
    if end.spill is None:
        return end.vector
    if results is None:
        raise BrokerError("the file lies in the object store, which this frontend does not read")
    return await results.get(end.spill)


class ImageWriter(WholeWriter):
    """Collects the pictures, and fetches those that were too large for a frame."""

    def __init__(self, created: int, pictures: int, counter: UsageCounter, results: ResultObjects | None) -> None:
        self.open = pictures
        self.unsettled = True
        self._created = created
        self._counter = counter
        self._results = results
        self._ends: list[Finish | None] = [None] * pictures
        self._body = b""

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            if row.fin is not None:
                self._ends[row.choice] = row.fin
                self._counter.end(row.choice, row.fin)
                self.open -= 1

    async def settle(self) -> None:
        """Fetch what is missing and make the body. Raises BrokerError."""
        files = [await file_of(end, self._results) for end in self._ends if end is not None]
        self._body = await asyncio.to_thread(_answer, self._created, files)

    def body(self) -> bytes:
        return self._body


def _answer(created: int, files: list[bytes]) -> bytes:
    """Return the answer of PNG files; all of a request have the same size."""
    width, height = struct.unpack_from(">2I", files[0], 16) if len(files[0]) >= 24 else (0, 0)
    data = b",".join(b'{"b64_json":"%b"}' % binascii.b2a_base64(file, newline=False) for file in files)
    return b'{"created":%d,"data":[%b],"output_format":"png","size":"%dx%d"}' % (created, data, width, height)


PATH = "/v1/images/generations"

_decoder = ReportingDecoder(ImageRequest)

_TAKEN: dict[str, tuple[str, ...]] = {
    "response_format": ("b64_json",),
    "output_format": ("png",),
    "quality": ("auto", "standard"),
    "background": ("auto", "opaque"),
}
"""Parameters with the values that are taken; all others are refused by name."""


class PictureApi:
    """Makes the jobs of requests for what one kind of model makes."""

    kind: ClassVar[Literal["image", "video"]]

    def __init__(self, model_cache: ModelCache, settings: FrontendSettings, results: ResultObjects | None) -> None:
        self._model_cache = model_cache
        self.settings = settings
        self.results = results
        self.error_form = FrontendError.body

    async def make(
        self, request: PictureRequest, exchange: HttpExchange, *, seed: int, n: int = 1, seconds: int | None = None
    ) -> Job:
        """Check a request and make its job, of `n` choices. Raises a FrontendError or an AdmissionError."""
        width, height = size_of(request.size)
        model = await self._model_cache.get(request.model)
        model.check_kind(self.kind)
        check_model(exchange.scope, model.card.model)
        limit = LengthLimit(context_length=model.card.context_length, wanted=1, truncate=None, param="prompt")
        prompt = await model.encoder.encode(request.prompt, add_special_tokens=True, limit=limit, salt=None)
        options, routing = job_options_of(request, exchange, self.settings, session_id=None)
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
            pooling=Pooling(task=self.kind, inputs=[PoolingInput(prompt.packed)] * n, picture=picture),
            prompt_tokens=prompt.tokens * n,
            max_tokens=1,  # no token is generated, but 0 would mean a whole context
            choices=n,
            explain=routing.explain,
        )


class ImageApi(PictureApi):
    kind = "image"

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        request = await decode_request(_decoder, body)
        _refuse(request)
        n = request.n or 1
        # Chosen here, so that a picture that has to be made again is the same one.
        seed = secrets.randbits(31) if request.seed is None else request.seed
        job = await self.make(request, exchange, seed=seed, n=n)
        counter = UsageCounter([job.prompt_tokens // n] * n, 1)
        return Plan([job], ImageWriter(exchange.created, n, counter, self.results), counter)


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


def _mount(site: Site) -> None:
    site.generate(PATH, ImageApi(site.model_cache, site.settings, site.stores.results))


def _paths() -> dict[str, Any]:
    answers = {"200": json_answer("the pictures", "ImageAnswer"), **all_errors()}
    return {PATH: {"post": {**operation("Make pictures of a prompt", answers), "requestBody": json_body("ImageRequest")}}}


API = HttpApi(mount=_mount, paths=_paths, types=SCHEMAS)
