"""Reads the folder of a diffusion pipeline: its `model_index.json` says what it makes and of which parts it consists."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.workers.errors import EngineStartFailed

INDEX = "model_index.json"
FALLBACK_SIZE = 1024  # pixels, of a pipeline whose configuration says nothing

_VIDEO = ("Video", "Wan", "LTX", "Mochi", "AnimateDiff")
_NOT_FROM_TEXT = ("Img2Img", "Inpaint", "ControlNet", "Upscale", "Edit", "Kontext", "Image2", "Depth", "Audio")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline that makes pictures from text. `size`: pixels of a side where a request does not say."""

    name: str  # the class that diffusers has for it
    version: str  # of diffusers, as it was saved
    folder: Path
    tokenizer_dir: Path | None  # with a tokenizer.json, if one of its tokenizers has that
    size: int


def read_pipeline(model: str) -> Pipeline:
    """Read and check a pipeline's folder. Raises EngineStartFailed naming what is missing or not served."""
    folder = Path(model)
    if not folder.is_dir():
        raise EngineStartFailed(f"{model!r} is no folder: a diffusion pipeline is a folder with {INDEX}")
    index = _read(folder / INDEX)
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise EngineStartFailed(f"{folder / INDEX} names no pipeline (_class_name)")
    if any(word in name for word in _VIDEO):
        raise EngineStartFailed(f"{model!r} is a {name}, which makes videos: these are not served")
    if any(word in name for word in _NOT_FROM_TEXT):
        raise EngineStartFailed(f"{model!r} is a {name}, which does not make pictures from text alone")
    parts = {key: value for key, value in index.items() if not key.startswith("_") and isinstance(value, list) and value[0]}
    if missing := sorted(key for key in parts if not (folder / key).is_dir()):
        raise EngineStartFailed(f"{model!r} is not complete: {INDEX} names {', '.join(missing)}, of which there is no folder")
    tokenizers = sorted(key for key in parts if key.startswith("tokenizer") and (folder / key / "tokenizer.json").is_file())
    return Pipeline(
        name=name,
        version=str(index.get("_diffusers_version", "")),
        folder=folder,
        tokenizer_dir=folder / tokenizers[0] if tokenizers else None,
        size=_size(folder),
    )


def _size(folder: Path) -> int:
    """Return the size that the model was trained for: that of its latents times the scale of its VAE."""
    for part in ("unet", "transformer"):
        if (path := folder / part / "config.json").is_file():
            latents = _read(path).get("sample_size")
            if isinstance(latents, int) and not isinstance(latents, bool) and 0 < latents <= 1024:
                vae = folder / "vae" / "config.json"
                channels = _read(vae).get("block_out_channels") if vae.is_file() else None
                scale = 2 ** (len(channels) - 1) if isinstance(channels, list) and 0 < len(channels) < 8 else 8
                return latents * scale
    return FALLBACK_SIZE


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
