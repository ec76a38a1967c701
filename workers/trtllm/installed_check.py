"""Checks that TensorRT-LLM is installed, that it can be imported, and that it has the API that the adapter uses."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import structlog

from headrace.workers.errors import EngineStartFailed
from headrace.workers.trtllm.contract import LINES, differences, release_line, takes

_log = structlog.get_logger()

PACKAGE = "tensorrt_llm"
HOW_TO_INSTALL = (
    "It runs on NVIDIA GPUs only. Its wheels are on NVIDIA's package index, not on PyPI, which has only a stub that points "
    "there: use NVIDIA's container, or on a machine with CUDA `pip install 'headrace[trtllm]'` with NVIDIA's index as "
    "--extra-index-url"
)


@dataclass(frozen=True, slots=True)
class Installed:
    """The installed package: its API module, its version, and what its release line can do."""

    api: Any  # tensorrt_llm.llmapi
    version: str
    priority: bool  # requests have a priority (1.3)

    @property
    def line(self) -> str:
        return release_line(self.version)


def missing_here(environ: Mapping[str, str] | None = None, *, library: Callable[[str], object] = ctypes.CDLL) -> list[str]:
    """Return what TensorRT-LLM needs and this machine lacks, a sentence each. Imports nothing of it."""
    missing = []
    path = environ.get("PATH") if environ is not None else None
    if shutil.which("nvidia-smi", path=path) is None:
        missing.append("There is no NVIDIA driver (nvidia-smi is not found).")
    try:
        library("libcuda.so.1")
    except OSError:
        missing.append("There is no CUDA driver library (libcuda.so.1 cannot be loaded).")
    if find_spec(PACKAGE) is None:
        missing.append(f"The Python package {PACKAGE} is not installed.")
    return missing


def check_package() -> None:
    """Raise EngineStartFailed, naming what is missing, where TensorRT-LLM is not installed. Imports nothing of it."""
    if find_spec(PACKAGE) is None:
        raise EngineStartFailed(f"TensorRT-LLM cannot run here. {' '.join(missing_here())} {HOW_TO_INSTALL}")


def load_installed() -> Installed:
    """Import TensorRT-LLM and compare it with what the adapter uses. Takes seconds. Raises EngineStartFailed."""
    check_package()
    try:
        import tensorrt_llm
        import tensorrt_llm.llmapi as api
    except Exception as error:  # it loads CUDA libraries, which fail in many ways
        lacking = " ".join(missing_here())
        raise EngineStartFailed(
            f"TensorRT-LLM is installed but cannot be imported ({type(error).__name__}: {error}). {lacking} {HOW_TO_INSTALL}"
        ) from error
    version = str(tensorrt_llm.__version__)
    if found := differences():
        raise EngineStartFailed(
            f"TensorRT-LLM {version} differs from the API that Headrace uses (written for {' and '.join(LINES)}): "
            + " ".join(found)
        )
    if release_line(version) not in LINES:
        _log.warning("engine.version_unknown", engine="trtllm", version=version, written_for=LINES)
    return Installed(api, version, priority=takes(api.LLM.generate_async, "priority"))
