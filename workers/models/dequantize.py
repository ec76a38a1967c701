"""Writes a GGUF model out as a plain Hugging Face folder: `python -m headrace.workers.models.dequantize MODEL.gguf FOLDER`.

The conversion is a program of its own because it needs torch, transformers and a gigabyte of memory for some seconds, which
its caller should not keep.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def dequantize(gguf: Path, folder: Path) -> None:
    """Convert `gguf` into `folder`: bf16 safetensors, tokenizer, chat template and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def main(arguments: list[str]) -> int:
    """Convert the model and return the exit code."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m headrace.workers.models.dequantize MODEL.gguf FOLDER\n")
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    gguf, folder = Path(arguments[0]), Path(arguments[1])
    dequantize(gguf, folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
