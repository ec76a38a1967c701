"""Finds the interpreter that runs the workers of an engine: this one, or one of an environment beside it.

Engines want different versions of the same packages. `make install ENGINE=sglang` on a machine with a GPU makes `.venv-sglang`
beside `.venv`; workers of SGLang then run there, whatever runs in `.venv`.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from headrace.base.errors import SettingsError

PACKAGES = {"sglang": "sglang"}
"""The package that an engine needs, for engines that may have an environment of their own."""


def beside(prefix: str, engine: str) -> Path:
    """Return where the interpreter of an engine's own environment is, given this environment's folder."""
    return Path(f"{prefix.rstrip('/')}-{engine}") / "bin" / "python"


def worker_python(engine: str, *, prefix: str = sys.prefix) -> str:
    """Return the interpreter for the workers of an engine. Raises SettingsError where the engine is installed in none."""
    package = PACKAGES.get(engine)
    if package is None or find_spec(package) is not None:
        return sys.executable
    own = beside(prefix, engine)
    if os.access(own, os.X_OK):
        return str(own)
    raise SettingsError(
        f"worker.engine = {engine!r}: the package {package} is not installed here, and there is no {own}; "
        f"`make install ENGINE={engine}` installs it"
    )
