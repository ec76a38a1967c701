"""Checks the files of an adapter before an engine reads them: weights as safetensors only, nothing that could run code.

The format: a little-endian 8-byte length, a JSON header of that length, then the tensors' bytes.  Read here and not by the
`safetensors` package, because a worker without an engine of its own, the simulator, does not have it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.workers.errors import AdapterFilesError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)

MOST_CONFIG = 1024 * 1024  # bytes
MOST_HEADER = 100 * 1024 * 1024  # bytes; the format's own limit
_LENGTH = 8
_RUNS_CODE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".py")


def check_adapter_folder(folder: Path) -> None:
    """Raise AdapterFilesError if this folder holds no adapter, or one that an engine must not read."""
    if not folder.is_dir():
        raise AdapterFilesError(f"there is no folder {folder}")
    for path in sorted(folder.iterdir()):
        if path.suffix in _RUNS_CODE:
            raise AdapterFilesError(f"{path} may hold code: adapters are read as safetensors only")
    _check_config(folder / CONFIG)
    _check_weights(folder / WEIGHTS)


def _check_config(path: Path) -> None:
    try:
        if path.stat().st_size > MOST_CONFIG:
            raise AdapterFilesError(f"{path} has {path.stat().st_size} bytes, more than {MOST_CONFIG}")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise AdapterFilesError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise AdapterFilesError(f"{path} is no JSON: {error}") from None
    kind = config.get("peft_type", "LORA") if isinstance(config, dict) else None
    if kind != "LORA":
        raise AdapterFilesError(f"{path} does not describe a LoRA adapter: peft_type is {kind!r}")


def _check_weights(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            if size < _LENGTH or not 2 <= length <= min(MOST_HEADER, size - _LENGTH):
                raise AdapterFilesError(f"{path} is no safetensors file: its header would have {length} of {size} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise AdapterFilesError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise AdapterFilesError(f"{path} is no safetensors file: {error}") from None
    data = size - _LENGTH - length
    if not isinstance(header, dict) or not all(_fits(value, data) for name, value in header.items() if name != "__metadata__"):
        raise AdapterFilesError(f"{path} is no safetensors file: a tensor lies outside of its {data} bytes")


def _fits(tensor: Any, size: int) -> bool:
    match tensor:
        case {"data_offsets": [int(begin), int(end)]}:
            return 0 <= begin <= end <= size
        case _:
            return False
