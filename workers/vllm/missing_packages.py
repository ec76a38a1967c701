"""Finds the package that vLLM's code for a model lacks. vLLM itself reports only that the model "failed to be inspected"."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

_UNINSPECTED = re.compile(r"Model architectures \[(?P<names>[^]]*)\] failed to be inspected")
_TORCHVISION = "torchvision"


def missing_code(complaint: str) -> str | None:
    """Return a better text for vLLM's error about code that it cannot import, or None for any other error."""
    found = _UNINSPECTED.search(complaint)
    if found is None:
        return None
    for name in re.findall(r"[\w.]+", found["names"]):
        if (why := _why_not(name)) is not None:
            return f"vLLM's code for {name} cannot be used: {why}"
    return None


def _why_not(architecture: str) -> str | None:
    from vllm.model_executor.models import ModelRegistry

    registered = ModelRegistry.models.get(architecture)
    module = getattr(registered, "module_name", None)
    if module is None:
        return None
    try:
        import_module(module)
    except ImportError as error:
        return explained(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def explained(error: ImportError) -> str:
    """Return what to install, without the CUDA build that a package index gives by default."""
    if error.name is None:
        return str(error)
    module = error.name.partition(".")[0]
    if module != _TORCHVISION:
        return f"the Python package that has the module {module!r} is not installed"
    return (
        f"torchvision is not installed. Install the build of it that belongs to this PyTorch ({_torch()}); where there is no "
        'GPU that is the CPU build, from the index that TORCH_INDEX_URL names (docs/engines.md, "Images, videos and sounds")'
    )


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed either"
