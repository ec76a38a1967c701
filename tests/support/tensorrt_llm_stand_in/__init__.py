"""A stand-in for the package `tensorrt_llm`, which cannot be installed without CUDA.

It has the names, arguments, checks and shapes that the documentation and the published sources of TensorRT-LLM 1.2 and of the
release candidates of 1.3 show, written anew, and computes with the simulator's vocabulary and timing. What it cannot show is
whether the real package does what its documentation says.

`installed()` makes it importable as `tensorrt_llm`; `model_folder()` makes a folder that its `LLM` takes for a model. Answers
are a function of all tokens so far, as a greedy model's are, so that a resumed answer continues exactly.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from headrace.workers.sim.tokens import BUNDLED_TOKENIZER, Vocabulary

PACKAGE_DIR = Path(__file__).parent / "package"
VERSION_VARIABLE = "TENSORRT_LLM_STAND_IN"
V1_2, V1_3 = "1.2.1", "1.3.0rc24"
VERSIONS = (V1_2, V1_3)


def _forget() -> None:
    for name in [name for name in tuple(sys.modules) if name.partition(".")[0] == "tensorrt_llm"]:  # threads import, too
        del sys.modules[name]


@contextlib.contextmanager
def installed(version: str = V1_3) -> Iterator[None]:
    """Have `import tensorrt_llm` find the stand-in, as this version, in this process. May be nested with one version."""
    before = os.environ.get(VERSION_VARIABLE)
    if before == version and str(PACKAGE_DIR) in sys.path:
        yield
        return
    os.environ[VERSION_VARIABLE] = version
    _forget()
    sys.path.insert(0, str(PACKAGE_DIR))
    try:
        yield
    finally:
        sys.path.remove(str(PACKAGE_DIR))
        _forget()
        if before is None:
            del os.environ[VERSION_VARIABLE]
        else:
            os.environ[VERSION_VARIABLE] = before


@lru_cache(maxsize=4)
def vocabulary_of(folder: str) -> Vocabulary:
    """Read a tokenizer's words, which takes a second. Kept here, since the package is imported anew by each `installed()`."""
    vocabulary = Vocabulary.load(folder)
    vocabulary.speller.prepare()
    return vocabulary


def model_folder(folder: Path, *, context_length: int = 4096, chat: bool = True) -> Path:
    """Make a model of the simulator's tokenizer, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", *(["chat_template.jinja"] if chat else [])):
        shutil.copy(BUNDLED_TOKENIZER / name, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "eos_token_id": 2,
        "max_position_embeddings": context_length,
        "vocab_size": 49152,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def adapter_folder(folder: Path, *, rank: int = 8) -> Path:
    """Make a folder that looks like a LoRA adapter of this rank."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "peft_type": "LORA"}))
    return folder
