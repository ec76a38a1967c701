"""Folders of diffusion pipelines, as diffusers saves them, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PARTS = {
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "safety_checker": [None, None],
}


def pipeline(folder: Path, *, name: str = "StableDiffusionPipeline", latents: int = 16, **index: Any) -> Path:
    """Write a pipeline whose pictures are `8 * latents` pixels wide and high."""
    found = {"_class_name": name, "_diffusers_version": "0.35.1", **PARTS, **index}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(found))
    for part, value in found.items():
        if not part.startswith("_") and isinstance(value, list) and value[0]:
            (folder / part).mkdir(exist_ok=True)
    (folder / "unet" / "config.json").write_text(json.dumps({"sample_size": latents}))
    (folder / "vae" / "config.json").write_text(json.dumps({"block_out_channels": [128, 256, 512, 512]}))
    return folder
