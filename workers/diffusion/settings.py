"""Declares the settings of the diffusion engine (`--engine-arg`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.workers.errors import EngineStartFailed


class DiffusionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine."""

    backend: Literal["stand-in"] = "stand-in"
    steps: Annotated[int, Meta(ge=1, le=1000)] = 4  # where a request does not say
    step_s: Annotated[float, Meta(ge=0, le=60)] = 0.05  # duration of a step of the stand-in
    slots: Annotated[int, Meta(ge=1, le=64)] = 1  # pictures or videos that are made at once
    max_pixels: Annotated[int, Meta(ge=64 * 64, le=1 << 26)] = 2048 * 2048  # of one picture
    seconds: Annotated[int, Meta(ge=1, le=120)] = 4  # of a video, where a request does not say
    fps: Annotated[int, Meta(ge=1, le=60)] = 8  # frames of a video in a second
    max_seconds: Annotated[int, Meta(ge=1, le=120)] = 12
    max_video_pixels: Annotated[int, Meta(ge=64 * 64, le=1 << 26)] = 1 << 25  # of all frames together
    max_steps: Annotated[int, Meta(ge=1, le=1000)] = 200


def settings_of(args: Mapping[str, Any]) -> DiffusionSettings:
    """Return the settings. Raises EngineStartFailed naming the one that is wrong."""
    try:
        return msgspec.convert(dict(args), DiffusionSettings, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(DiffusionSettings.__struct_fields__)
        raise EngineStartFailed(f"diffusion settings: {error}; there are {known}") from error
