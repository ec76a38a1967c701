"""Makes pictures and videos from text with a pipeline of `diffusers`, one at a time, in a thread that stops between steps."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import threading
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import structlog
from msgspec import Meta

from headrace.broker.messages.requests import Picture
from headrace.workers.blocking import run_in_thread
from headrace.workers.engine import (
    Capabilities,
    EngineConfig,
    EngineInfo,
    Load,
    Pooled,
    PoolItem,
    Role,
    Sequence,
    Sink,
)
from headrace.workers.errors import EngineDead, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.kit import EngineBase, EngineSupport, words
from headrace.workers.tokens import token_table

log = structlog.get_logger()

ABILITIES = Capabilities(resume=False, seeds=False)
SUPPORT = EngineSupport(name="diffusion", title="diffusers 0.42", words=words(ABILITIES, ("image", "video")))

INDEX = "model_index.json"
BUNDLED_TOKENIZER = Path(__file__).resolve().parent / "assets" / "smollm2"
LONGEST_PROMPT = 4096  # tokens, of a pipeline whose tokenizer says nothing
FALLBACK_VIDEO = 832 * 480  # pixels of a frame, of a pipeline that says nothing
_BLOCK = 16  # tokens; nothing is cached, but a pool has a block size
_NEEDED = ("prompt", "generator", "num_inference_steps", "callback_on_step_end")
_NOT_FROM_TEXT = (
    *("Img2Img", "Inpaint", "ControlNet", "Upscale", "Edit", "Kontext", "Depth", "Audio"),
    *("Image2", "ImageTo", "Video2", "VideoTo", "StableVideo", "I2V"),
)


class DiffusionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"  # auto: a GPU where there is one
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 on a GPU, float32 without one
    steps: Annotated[int, Meta(ge=1, le=1000)] | None = None  # where a request does not say; None = the pipeline's own
    max_steps: Annotated[int, Meta(ge=1, le=1000)] = 200
    max_pixels: Annotated[int, Meta(ge=64 * 64, le=1 << 26)] = 2048 * 2048  # of one picture
    seconds: Annotated[int, Meta(ge=1, le=120)] = 4  # of a video, where a request does not say
    fps: Annotated[int, Meta(ge=1, le=60)] = 16  # frames of a video in a second
    max_seconds: Annotated[int, Meta(ge=1, le=120)] = 12
    max_video_pixels: Annotated[int, Meta(ge=64 * 64, le=1 << 28)] = 1 << 26  # of all frames together


class Stopped(Exception):
    """The picture is not wanted any more."""


class DiffusionEngine(EngineBase):
    """Runs one pipeline. Requests take turns in the order of arrival."""

    NAME = "diffusion engine"
    capabilities: Capabilities = ABILITIES

    def __init__(self) -> None:
        super().__init__()
        self._settings = DiffusionSettings()
        self._pipe: Any = None
        self._takes: Mapping[str, inspect.Parameter] = {}
        self._kind: Literal["image", "video"] = "image"
        self._free = asyncio.Semaphore(1)  # held until the thread has ended, also for a call that is cancelled
        self._inside = 0  # pictures or videos that are made or wait for their turn

    async def start(self, config: EngineConfig, sink: Sink) -> EngineInfo:
        if config.role is not Role.AGGREGATED:
            raise EngineStartFailed(f"a diffusion engine has no role {config.role.value!r}")
        try:
            self._settings = settings = msgspec.convert(dict(config.args), DiffusionSettings, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(DiffusionSettings.__struct_fields__)
            raise EngineStartFailed(f"diffusion settings: {error}; there are {known}") from error
        check_folder(config.model)
        pipe, version = await run_in_thread(lambda: load_pipeline(config.model, settings), name="diffusion-start")
        name, takes = type(pipe).__name__, inspect.signature(type(pipe).__call__).parameters
        if missing := [one for one in _NEEDED if one not in takes]:
            raise EngineStartFailed(f"{config.model!r} is a {name}, which takes no {', '.join(missing)}")
        self._kind = "video" if "num_frames" in takes else "image"
        folder, longest = _tokenizer(pipe, Path(config.model))
        table = await asyncio.to_thread(token_table, folder)
        self._pipe, self._takes = pipe, takes
        log.info("diffusion.loaded", pipeline=name, kind=self._kind, device=str(pipe.device), dtype=str(pipe.dtype))
        return EngineInfo(
            engine="diffusion",
            version=version,
            tokenizer_dir=str(folder),
            context_length=longest + 1,  # a prompt leaves room for a token, though none is generated
            block_size=_BLOCK,
            blocks=0,
            slots=1,
            vocab_size=len(table.pieces),
            eos_token_ids=(),
            kinds=(self._kind,),
            extra={"pipeline": name, "device": str(pipe.device), "dtype": str(pipe.dtype).removeprefix("torch.")},
        )

    async def pool(self, item: PoolItem) -> Pooled:
        """Make the picture or the video of an input. A cancelled call ends between two steps."""
        self.check_alive()
        picture = item.picture
        if picture is None or item.task != self._kind:
            raise UnsupportedByEngine(f"this diffusion engine makes {self._kind}s; it has no task {item.task!r}", param="model")
        options, frames = self._options(picture), self._frames(picture) if self._kind == "video" else 0
        stop = threading.Event()
        self._inside += 1
        try:
            await self._turn()
            work = asyncio.ensure_future(run_in_thread(lambda: self._make(picture, options, frames, stop), name=item.id))
            work.add_done_callback(self._ended)
            await self._over(work)
            return Pooled(work.result())
        finally:
            stop.set()
            self._inside -= 1

    async def _turn(self) -> None:
        """Wait until no thread computes. Raises EngineDead."""
        turn = asyncio.ensure_future(self._free.acquire())
        try:
            await self._over(turn)
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._free.release()
            turn.cancel()
            raise

    async def _over(self, future: asyncio.Future[Any]) -> None:
        """Wait for the end of a future or of the engine. Raises EngineDead."""
        death = asyncio.create_task(self._dead.wait())
        try:
            await asyncio.wait([future, death], return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
        self.check_alive()

    def _ended(self, work: asyncio.Future[bytes]) -> None:
        self._free.release()
        if not work.cancelled():
            work.exception()  # seen, also where its call was cancelled

    def _options(self, picture: Picture) -> dict[str, Any]:
        """Return the arguments of the pipeline. Raises RequestInvalid."""
        settings = self._settings
        steps = settings.steps if picture.steps is None else picture.steps
        given: dict[str, Any] = {
            "width": picture.width,
            "height": picture.height,
            "num_inference_steps": steps,
            "guidance_scale": picture.guidance,
            "negative_prompt": picture.negative_prompt or None,
        }
        options = {name: value for name, value in given.items() if value is not None}
        for name in options.keys() - self._takes.keys():
            param = "size" if name in ("width", "height") else name
            raise RequestInvalid(f"{type(self._pipe).__name__} takes no {name}", param=param)
        if (picture.width or 0) * (picture.height or 0) > (most := settings.max_pixels):
            told = f"{picture.width}x{picture.height} is more than {most} pixels, the most of this worker"
            raise RequestInvalid(told, param="size")
        if steps is not None and not 1 <= steps <= settings.max_steps:
            message = f"num_inference_steps is {steps}; this worker takes 1 to {settings.max_steps}"
            raise RequestInvalid(message, param="num_inference_steps")
        return options

    def _frames(self, picture: Picture) -> int:
        """Return the frames of a video. Raises RequestInvalid."""
        settings = self._settings
        seconds = settings.seconds if picture.seconds is None else picture.seconds
        if not 1 <= seconds <= settings.max_seconds:
            raise RequestInvalid(f"seconds is {seconds}; this worker takes 1 to {settings.max_seconds}", param="seconds")
        frames = seconds * settings.fps
        own = [self._takes[side].default for side in ("width", "height") if side in self._takes]
        usual = own[0] * own[1] if len(own) == 2 and all(isinstance(side, int) for side in own) else FALLBACK_VIDEO
        pixels = (picture.width or 0) * (picture.height or 0) or usual
        if frames * pixels > settings.max_video_pixels:
            told = f"{frames} frames of {pixels} pixels are more than {settings.max_video_pixels}, the most of this worker"
            raise RequestInvalid(told, param="seconds")
        return frames

    def _make(self, picture: Picture, options: dict[str, Any], frames: int, stop: threading.Event) -> bytes:
        """Run the pipeline and return a file. Raises Stopped, RequestInvalid for what the pipeline itself refuses."""
        begun = False

        def between(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            nonlocal begun
            begun = True
            if stop.is_set():
                raise Stopped
            return tensors

        options |= {"prompt": picture.prompt, "callback_on_step_end": between}
        # the same noise on each device
        options["generator"] = import_module("torch").Generator("cpu").manual_seed(picture.seed)
        if frames:
            names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
            every: int = next((getattr(self._pipe, name) for name in names if getattr(self._pipe, name, None)), 1)
            # the first latent becomes one frame, each other one `every`
            options |= {"num_frames": -(-(frames - 1) // every) * every + 1, "output_type": "np"}
            if "frame_rate" in self._takes:
                options["frame_rate"] = self._settings.fps
        if stop.is_set():
            raise Stopped
        try:
            made = self._pipe(**options)
        except (ValueError, TypeError) as error:
            if begun:
                raise
            raise RequestInvalid(f"{type(self._pipe).__name__}: {error}") from error
        if frames:
            return mp4(made.frames[0][:frames], self._settings.fps)
        file = io.BytesIO()
        made.images[0].save(file, "PNG")
        return file.getvalue()

    def check_alive(self) -> None:
        if self._death is not None:
            raise EngineDead(f"the diffusion engine is dead: {self._death}")
        if self._pipe is None:
            raise EngineDead("the diffusion engine is not started")

    # -- life --------------------------------------------------------------------------------------------------

    def load(self) -> Load:
        running = min(self._inside, 1)
        return Load(running=running, waiting=self._inside - running)

    async def stop(self, grace_s: float) -> None:
        self._die("stopped")
        try:
            async with asyncio.timeout(grace_s):
                await self._free.acquire()
        except TimeoutError:
            log.warning("diffusion.still_computing", grace_s=grace_s)
        self._pipe = None

    async def submit(self, sequence: Sequence) -> None:
        raise UnsupportedByEngine("a diffusion engine makes pictures or videos, and generates no text", param="model")

    async def abort(self, ids: Seq[str]) -> None:
        """Do nothing: a picture stops when its call is cancelled, and nothing else runs here."""


def check_folder(model: str) -> None:
    """Check the folder of a pipeline, before a package is imported. Raises EngineStartFailed."""
    folder = Path(model)
    if not folder.is_dir():
        raise EngineStartFailed(f"{model!r} is not a folder: a diffusion pipeline is a folder with {INDEX}")
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except FileNotFoundError:
        raise EngineStartFailed(f"{folder / INDEX} does not exist") from None
    except (OSError, ValueError) as error:
        raise EngineStartFailed(f"{folder / INDEX} cannot be read: {error}") from error
    name = index.get("_class_name") if isinstance(index, dict) else None
    if not isinstance(name, str):
        raise EngineStartFailed(f"{folder / INDEX} names no pipeline (_class_name)")
    if any(word in name for word in _NOT_FROM_TEXT):
        raise EngineStartFailed(f"{model!r} is a {name}, which needs more than a text")
    parts = [key for key, value in index.items() if isinstance(value, list) and value and value[0]]
    if missing := sorted(key for key in parts if not (folder / key).is_dir()):
        raise EngineStartFailed(f"{model!r} is not complete: {INDEX} names {', '.join(missing)}, of which there is no folder")


def load_pipeline(model: str, settings: DiffusionSettings) -> tuple[Any, str]:
    """Return a pipeline on its device, and the version of diffusers. Blocks for seconds. Raises EngineStartFailed."""
    try:
        diffusers, torch = import_module("diffusers"), import_module("torch")
    except ImportError as error:
        raise EngineStartFailed(f"diffusers is not installed ({error}): pip install 'headrace[diffusion]'") from error
    has_gpu = torch.cuda.is_available()
    device = ("cuda" if has_gpu else "cpu") if settings.device == "auto" else settings.device
    dtype = ("float32" if device == "cpu" else "bfloat16") if settings.dtype == "auto" else settings.dtype
    diffusers.utils.logging.disable_progress_bar()  # of the loading: a worker has log lines
    try:
        # neither pickles nor code of a model's author, nor anything from elsewhere
        pipe = diffusers.DiffusionPipeline.from_pretrained(
            model, dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe.to(device), str(diffusers.__version__)
    except Exception as error:
        raise EngineStartFailed(f"diffusers could not load {model}: {error}") from error


def mp4(frames: Any, fps: int) -> bytes:
    """Return frames (RGB from 0 to 1, as an array of frames, rows, columns, colours) as an MP4 file in H.264."""
    av = import_module("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in (frames * 255).round().astype("uint8"):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def _tokenizer(pipe: Any, folder: Path) -> tuple[Path, int]:
    """Return the folder and the longest prompt of the tokenizer that takes most, of those with a tokenizer.json."""
    found = [
        (min(int(part.model_max_length), LONGEST_PROMPT), folder / name)
        for name, part in pipe.components.items()
        if name.startswith("tokenizer") and part is not None and (folder / name / "tokenizer.json").is_file()
    ]
    longest, path = max(found, default=(LONGEST_PROMPT, BUNDLED_TOKENIZER))
    return path, longest
