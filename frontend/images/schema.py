"""The types of OpenAI's image generation, with the additions of servers of diffusion models."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

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
