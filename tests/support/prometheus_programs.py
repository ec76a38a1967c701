"""Finds Prometheus' programs, for the tests of what is in deploy/."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

UNPACKED = Path(__file__).parents[2] / ".venv" / "prometheus" / "usr" / "bin"  # by `make monitors`


def program(name: str) -> str | None:
    """Return where a program is: named by a variable, installed, or unpacked; None if it is not here."""
    return os.environ.get(name.upper()) or shutil.which(name) or shutil.which(name, path=str(UNPACKED))
