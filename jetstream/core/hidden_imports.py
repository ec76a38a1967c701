"""Imports without what a library takes along only where it happens to be installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def hidden(name: str) -> Iterator[None]:
    """What is imported in here finds no module `name`, unless that was imported before. Afterwards it is there again."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # as the import system notes that there is none
    try:
        yield
    finally:
        del sys.modules[name]
