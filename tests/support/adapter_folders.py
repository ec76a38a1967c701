"""Makes the folder of a small LoRA adapter, in PEFT's format, without an engine."""

from __future__ import annotations

import json
from pathlib import Path


def safetensors(data: bytes = b"\0" * 8, **changes: object) -> bytes:
    """Return a file with one tensor."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, len(data)], **changes}}).encode()
    return len(header).to_bytes(8, "little") + header + data


def adapter_folder(folder: Path, *, weights: bytes | None = None, config: bytes | None = None) -> Path:
    """Write an adapter of rank 8, or one with other files."""
    folder.mkdir(parents=True, exist_ok=True)
    described = json.dumps({"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}).encode()
    (folder / "adapter_config.json").write_bytes(described if config is None else config)
    (folder / "adapter_model.safetensors").write_bytes(safetensors() if weights is None else weights)
    return folder
