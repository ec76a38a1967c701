"""Hides optional packages from a library's imports, which would load them wherever they are installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def hidden(name: str) -> Iterator[None]:
    """Let imports in the body find no module `name`, unless it was imported before. Restore it afterwards."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # the import system's own mark for a missing module
    try:
        yield
    finally:
        del sys.modules[name]
