"""Finds the Pythons of this machine that Headrace supports."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

MINORS = (11, 12, 13)  # of Python 3, that Headrace supports


def interpreters(path: str, versions: Path) -> dict[int, str]:
    """Return minor version → interpreter, from the programs on `path` and the folders of pyenv in `versions`."""
    found: dict[int, str] = {}
    for minor in MINORS:
        named = shutil.which(f"python3.{minor}", path=path)
        installed = sorted(versions.glob(f"3.{minor}.*/bin/python3"), reverse=True)
        for candidate in [*filter(None, [named]), *map(str, installed)]:
            if _minor_of(candidate) == minor:
                found[minor] = candidate
                break
    return found


def installed_interpreters() -> dict[int, str]:
    """Return minor version → interpreter, from PATH and pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    return interpreters(os.environ.get("PATH", ""), versions)


def not_tried(tried: Iterable[int]) -> str:
    """Return a line that names the supported Pythons outside `tried`, empty where there are none."""
    missing = [f"3.{minor}" for minor in MINORS if minor not in tried]
    return f"not tried, since not installed here: Python {', '.join(missing)}" if missing else ""


def _minor_of(python: str) -> int | None:
    """Return the minor version of an interpreter, None for a program that is none, as a shim of pyenv may be."""
    try:
        asked = [python, "-c", "import sys; print(sys.version_info.minor)"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
        return int(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
