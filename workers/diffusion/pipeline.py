"""Reads the folder of a diffusion pipeline: its `model_index.json` says what it makes and of which parts it consists."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.workers.errors import EngineStartFailed

INDEX = "model_index.json"
FALLBACK_SIZE = 1024  # pixels, of a pipeline whose configuration says nothing
FALLBACK_VIDEO = (832, 480)

_VIDEO = ("Video", "Wan", "LTX", "Mochi", "AnimateDiff")
_NOT_FROM_TEXT = (
    *("Img2Img", "Inpaint", "ControlNet", "Upscale", "Edit", "Kontext", "Depth", "Audio"),
    *("Image2", "ImageTo", "Video2", "VideoTo", "StableVideo", "I2V"),
)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline that makes pictures or videos from text. `width` and `height`: pixels where a request does not say."""

    name: str  # the class that diffusers has for it
    kind: Literal["image", "video"]
    version: str  # of diffusers, as it was saved
    folder: Path
    tokenizer_dir: Path | None  # with a tokenizer.json, if one of its tokenizers has that
    width: int
    height: int


def read_pipeline(model: str) -> Pipeline:
    """Read and check a pipeline's folder. Raises EngineStartFailed naming what is missing or not served."""
    folder = Path(model)
    if not folder.is_dir():
        raise EngineStartFailed(f"{model!r} is no folder: a diffusion pipeline is a folder with {INDEX}")
    index = _read(folder / INDEX)
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise EngineStartFailed(f"{folder / INDEX} names no pipeline (_class_name)")
    kind: Literal["image", "video"] = "video" if any(word in name for word in _VIDEO) else "image"
    if any(word in name for word in _NOT_FROM_TEXT):
        made = "pictures" if kind == "image" else "videos"
        raise EngineStartFailed(f"{model!r} is a {name}, which does not make {made} from text alone")
    parts = {key: value for key, value in index.items() if not key.startswith("_") and isinstance(value, list) and value[0]}
    if missing := sorted(key for key in parts if not (folder / key).is_dir()):
        raise EngineStartFailed(f"{model!r} is not complete: {INDEX} names {', '.join(missing)}, of which there is no folder")
    tokenizers = sorted(key for key in parts if key.startswith("tokenizer") and (folder / key / "tokenizer.json").is_file())
    width, height = _size(folder, kind)
    return Pipeline(
        name=name,
        kind=kind,
        version=str(index.get("_diffusers_version", "")),
        folder=folder,
        tokenizer_dir=folder / tokenizers[0] if tokenizers else None,
        width=width,
        height=height,
    )


def _size(folder: Path, kind: Literal["image", "video"]) -> tuple[int, int]:
    """Return the width and height that the model was trained for: those of its latents times the scale of its VAE."""
    for part in ("unet", "transformer"):
        if (path := folder / part / "config.json").is_file():
            about = _read(path)
            width, height = (about.get(f"sample_{side}", about.get("sample_size")) for side in ("width", "height"))
            if isinstance(width, int) and isinstance(height, int) and _is_side(width) and _is_side(height):
                vae = folder / "vae" / "config.json"
                channels = _read(vae).get("block_out_channels") if vae.is_file() else None
                scale = 2 ** (len(channels) - 1) if isinstance(channels, list) and 0 < len(channels) < 8 else 8
                return width * scale, height * scale
    return (FALLBACK_SIZE, FALLBACK_SIZE) if kind == "image" else FALLBACK_VIDEO


def _is_side(latents: int) -> bool:
    return latents is not True and 0 < latents <= 1024


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise EngineStartFailed(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise EngineStartFailed(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise EngineStartFailed(f"{path} is no JSON object")
    return found
