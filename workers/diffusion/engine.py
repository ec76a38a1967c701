"""Implements the engine protocol for pictures and videos from text: a pipeline is read and checked, and a stand-in paints.

Nothing here computes with a model: `stand-in` is the only back end. What it shows is everything around one: pipelines, jobs,
limits, slots, time per step, deaths.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NoReturn

import structlog

from headrace.broker.messages import Picture
from headrace.workers.diffusion.film import film
from headrace.workers.diffusion.pipeline import Pipeline, read_pipeline
from headrace.workers.diffusion.settings import DiffusionSettings, settings_of
from headrace.workers.diffusion.stand_in import paint
from headrace.workers.diffusion.support import ABILITIES
from headrace.workers.engine import (
    Capabilities,
    EngineConfig,
    EngineInfo,
    KvBatch,
    Load,
    Pooled,
    PoolItem,
    Role,
    Sequence,
    Sink,
)
from headrace.workers.errors import EngineDead, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.text.tokens import token_table

log = structlog.get_logger()

BUNDLED_TOKENIZER = Path(__file__).resolve().parents[1] / "assets" / "smollm2"
LONGEST_PROMPT = 4096  # tokens
_BLOCK = 16  # tokens; nothing is cached, but a pool has a block size


class DiffusionEngine:
    """Makes pictures or videos of prompts, `slots` at once, in the order of arrival."""

    def __init__(self) -> None:
        self._settings = DiffusionSettings()
        self._pipeline: Pipeline | None = None
        self._slots = asyncio.Semaphore(1)
        self._started = False
        self._inside = 0  # pictures or videos that are made or wait for a slot
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def capabilities(self) -> Capabilities:
        return ABILITIES

    async def start(self, config: EngineConfig, sink: Sink) -> EngineInfo:
        if config.role is not Role.AGGREGATED:
            raise EngineStartFailed(f"a diffusion engine has no role {config.role.value!r}")
        self._settings = settings = settings_of(config.args)
        pipeline = await asyncio.to_thread(read_pipeline, config.model)
        self._pipeline = pipeline
        self._slots = asyncio.Semaphore(settings.slots)
        folder = pipeline.tokenizer_dir or BUNDLED_TOKENIZER
        table = await asyncio.to_thread(token_table, folder)
        self._started = True
        log.warning("diffusion.stand_in", pipeline=pipeline.name, meaning=f"it makes test {pipeline.kind}s: no model computes")
        return EngineInfo(
            engine="diffusion",
            version="stand-in",
            tokenizer_dir=str(folder),
            context_length=LONGEST_PROMPT,
            block_size=_BLOCK,
            blocks=0,
            slots=settings.slots,
            vocab_size=len(table.pieces),
            eos_token_ids=(),
            kinds=(pipeline.kind,),
            extra={
                "pipeline": pipeline.name,
                "diffusers": pipeline.version,
                "width": pipeline.width,
                "height": pipeline.height,
            },
        )

    async def pool(self, item: PoolItem) -> Pooled:
        """Make the picture or the video of an input, which takes as long as its steps."""
        self._alive()
        pipeline, picture = self._pipeline, item.picture
        if pipeline is None or picture is None or item.task != pipeline.kind:
            made = "nothing" if pipeline is None else f"{pipeline.kind}s"
            raise UnsupportedByEngine(f"this diffusion engine makes {made}; it has no task {item.task!r}", param="model")
        width, height = picture.width or pipeline.width, picture.height or pipeline.height
        steps = self._steps(picture, width, height)
        frames = self._frames(picture, width * height) if item.task == "video" else 0
        self._inside += 1
        try:
            async with self._slots:
                for _ in range(steps):
                    await self._step()
                return Pooled(await asyncio.to_thread(self._make, picture, width, height, frames))
        finally:
            self._inside -= 1

    async def _step(self) -> None:
        """Take the time of a step. Raises EngineDead."""
        await asyncio.wait([self._death], timeout=self._settings.step_s)
        self._alive()

    def _make(self, picture: Picture, width: int, height: int, frames: int) -> bytes:
        if not frames:
            return paint(picture, width=width, height=height)
        return film(picture, width=width, height=height, frames=frames, fps=self._settings.fps)

    def _steps(self, picture: Picture, width: int, height: int) -> int:
        """Return the steps of a picture or video. Raises RequestInvalid."""
        if width * height > (most := self._settings.max_pixels):
            raise RequestInvalid(f"{width}x{height} is more than {most} pixels, the most of this worker", param="size")
        steps = self._settings.steps if picture.steps is None else picture.steps
        if not 1 <= steps <= self._settings.max_steps:
            message = f"num_inference_steps is {steps}; this worker takes 1 to {self._settings.max_steps}"
            raise RequestInvalid(message, param="num_inference_steps")
        return steps

    def _frames(self, picture: Picture, pixels: int) -> int:
        """Return the frames of a video whose frames have so many pixels. Raises RequestInvalid."""
        settings = self._settings
        seconds = settings.seconds if picture.seconds is None else picture.seconds
        if not 1 <= seconds <= settings.max_seconds:
            raise RequestInvalid(f"seconds is {seconds}; this worker takes 1 to {settings.max_seconds}", param="seconds")
        frames = seconds * settings.fps
        if frames * pixels > settings.max_video_pixels:
            told = f"{frames} frames of {pixels} pixels are more than {settings.max_video_pixels}, the most of this worker"
            raise RequestInvalid(told, param="seconds")
        return frames

    def _alive(self) -> None:
        if self._death.done():
            raise EngineDead(f"the diffusion engine is dead: {self._death.result()}")
        if not self._started:
            raise EngineDead("the diffusion engine is not started")

    # -- life --------------------------------------------------------------------------------------------------

    def load(self) -> Load:
        running = min(self._inside, self._settings.slots)
        return Load(running=running, waiting=self._inside - running)

    async def healthy(self) -> None:
        self._alive()

    async def died(self) -> str:
        return await asyncio.shield(self._death)

    def blamed(self) -> frozenset[str]:
        return frozenset()

    def die(self, reason: str) -> None:
        """End the engine as a crash would."""
        if not self._death.done():
            self._death.set_result(reason)

    async def stop(self, grace_s: float) -> None:
        self.die("stopped")

    async def control(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        raise UnsupportedByEngine(f"a diffusion engine has no operation {op!r}", param="op")

    # -- of engines that generate text ---------------------------------------------------------------------------

    async def submit(self, sequence: Sequence) -> None:
        raise UnsupportedByEngine("a diffusion engine makes pictures or videos, and generates no text", param="model")

    async def abort(self, ids: Seq[str]) -> None:
        """Do nothing: a picture stops when its call is cancelled, and nothing else runs here."""

    def kv_events(self, rank: int = 0) -> AsyncGenerator[KvBatch]:
        _no_cache()

    async def replay_kv(self, start: int, rank: int = 0) -> list[KvBatch]:
        _no_cache()

    def meet(self, peers: Mapping[str, bytes]) -> None:
        """Ignore the peers: no engine hands anything over to this one."""

    async def release(self, sequence_id: str, params: Mapping[str, Any] | None) -> None:
        """Release nothing, as no blocks are on offer."""

    async def set_role(self, role: Role) -> None:
        if role is not Role.AGGREGATED:
            raise UnsupportedByEngine(f"a diffusion engine has no role {role.value!r}", param="role")


def _no_cache() -> NoReturn:
    raise UnsupportedByEngine("a diffusion engine has no KV cache")
