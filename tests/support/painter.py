"""The diffusion engine without a model: files whose bytes are a function of the request, after as many steps as it asks for."""

from __future__ import annotations

import inspect
import struct
import threading
from typing import Any

import msgspec

from headrace.broker.messages.requests import Picture
from headrace.workers.diffusion import BUNDLED_TOKENIZER, DiffusionEngine, DiffusionSettings, Stopped
from headrace.workers.engine import EngineConfig, EngineInfo, Sink

STEPS = 2  # where a request does not say
PNG = b"\x89PNG\r\n\x1a\n"


def png(picture: Picture) -> bytes:
    """Return the head of a PNG file, with as many bytes as pixels."""
    width, height = picture.width or 128, picture.height or 128
    return PNG + struct.pack(">I4s2I", 13, b"IHDR", width, height) + _filled(picture, width * height)


def mp4(picture: Picture, seconds: int) -> bytes:
    """Return the boxes of an MP4 file that tell its size and length, with as many bytes as pixels of a frame."""
    width, height = picture.width or 128, picture.height or 128
    head = struct.pack(">5I", 0, 0, 0, 1000, 1000 * seconds) + bytes(80)
    track = struct.pack(">I", 7) + bytes(72) + struct.pack(">2I", width << 16, height << 16)
    movie = _box(b"moov", _box(b"mvhd", head) + _box(b"trak", _box(b"tkhd", track)))
    return _box(b"mdat", _filled(picture, width * height)) + movie


def _filled(picture: Picture, size: int) -> bytes:
    text = msgspec.json.encode(picture)
    return (text * (size // len(text) + 1))[:size]


def _box(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(body), kind) + body


class Painter(DiffusionEngine):
    """Makes pictures, or videos where the model's name ends so."""

    step_s = 0.01
    made: list[Painter] = []

    def __init__(self) -> None:
        super().__init__()
        Painter.made.append(self)

    async def start(self, config: EngineConfig, sink: Sink) -> EngineInfo:
        self._settings = msgspec.convert(dict(config.args), DiffusionSettings)
        self._kind = "video" if config.model.endswith("videos") else "image"
        self._pipe, self._takes = self, inspect.signature(_call).parameters
        return EngineInfo(
            engine="painter",
            version="1",
            tokenizer_dir=str(BUNDLED_TOKENIZER),
            context_length=512,
            block_size=16,
            blocks=0,
            slots=1,
            vocab_size=49152,
            eos_token_ids=(),
            kinds=(self._kind,),
        )

    def _make(self, picture: Picture, options: dict[str, Any], frames: int, stop: threading.Event) -> bytes:
        for _ in range(options.get("num_inference_steps", STEPS)):
            if stop.wait(self.step_s):
                raise Stopped
        return mp4(picture, frames // self._settings.fps) if frames else png(picture)


class SlowPainter(Painter):
    """Takes long enough to be killed or stopped."""

    step_s = 0.5


def _call(width: int, height: int, num_inference_steps: int, guidance_scale: float, negative_prompt: str) -> None:
    """The parameters that a pipeline takes."""
