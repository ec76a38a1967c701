"""Checks that SGLang is installed in this interpreter, without importing it."""

from __future__ import annotations

from importlib.util import find_spec

from headrace.workers.errors import EngineStartFailed

INSTALL = (
    "in a checkout `make install ENGINE=sglang` installs it; elsewhere, with a GPU, pip install 'headrace[sglang]' does, in an "
    "environment of its own"
)


def check_packages() -> None:
    """Raise EngineStartFailed for the first package that a worker with SGLang needs and that is not installed."""
    for package in ("torch", "sglang"):
        if find_spec(package) is None:
            raise EngineStartFailed(f"the Python package {package} is not installed; {INSTALL}")
