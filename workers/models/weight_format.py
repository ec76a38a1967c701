"""Chooses the format in which an engine reads a model's weights: safetensors, unless the operator says otherwise.

Left alone, engines read `*.bin` and `*.pt` where there are no safetensors.  Those are pickles, which can hold code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.workers.errors import EngineStartFailed

SETTING = "load_format"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def weight_format(model: str, args: Mapping[str, Any]) -> dict[str, str]:
    """Return the engine setting that lets only safetensors be read, empty where the operator has given it, and for GGUF.

    Raises EngineStartFailed for a folder whose weights are pickles.
    """
    path = Path(model).expanduser()
    if args.get(SETTING) is not None or "://" in model or path.is_file() or (":" in model and not path.is_dir()):
        return {}
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return {SETTING: "mistral" if any(path.glob("consolidated*.safetensors")) else "safetensors"}
    if any(path.glob("*.gguf")):
        return {}
    if pickled := sorted(file.name for pattern in _PICKLES for file in path.glob(pattern)):
        raise EngineStartFailed(
            f"the weights in {path.resolve()} are pickles ({pickled[0]}), which can hold code: convert them to safetensors, or "
            f"say that they may be read with --engine-arg {SETTING}=auto"
        )
    return {SETTING: "safetensors"}
