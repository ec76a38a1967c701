"""Defines the requests and answers of the routes over videos, with the additions of servers of diffusion models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.schema.stored import Page

MOST_SECONDS = 120

Status = Literal["queued", "in_progress", "completed", "failed"]


class VideoRequest(msgspec.Struct, kw_only=True):
    """A request, as JSON or as the fields of a form. `None` always means: not given."""

    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None  # None = the only one that is served
    seconds: int | str | None = None  # a whole number from 1 to MOST_SECONDS, which clients send as a text
    size: str | None = None  # "1280x720", or "auto"
    input_reference: Any = None  # refused by name
    user: str | None = None  # without effect
    # Beyond OpenAI's:
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    negative_prompt: Annotated[str, Meta(max_length=32_000)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    service_tier: str | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None  # seconds


class VideoFault(msgspec.Struct, kw_only=True, frozen=True):
    """The reason why a video was not made."""

    code: str
    message: str


class VideoObject(msgspec.Struct, kw_only=True, frozen=True):
    """A video and how it stands. `size` is "auto" until a model that chose it has made the video."""

    id: str
    object: Literal["video"] = "video"
    model: str
    prompt: str
    status: Status = "queued"
    progress: int = 0  # percent: 0 until it is completed, and then 100
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None  # of the file, once there is one
    seconds: str = ""
    size: str = "auto"
    remixed_from_video_id: str | None = None
    error: VideoFault | None = None


class VideoRecord(msgspec.Struct, kw_only=True, frozen=True):
    """A video as it is stored. `job` is the token of its job, which ends before `until` (Unix time)."""

    video: VideoObject
    job: str
    until: float


class VideoList(Page, kw_only=True):
    """A page of videos."""

    data: list[VideoObject]


class DeletedVideo(msgspec.Struct, kw_only=True):
    """A video that was deleted."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


class VideoAnswer(msgspec.Struct, kw_only=True):
    """The result of a video's job: an MP4 file in base64, with its size and length."""

    created: int
    size: str
    seconds: str
    b64_json: str


SCHEMAS: tuple[Any, ...] = (VideoRequest, VideoObject, VideoList, DeletedVideo)
