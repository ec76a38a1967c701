"""Makes a peer's environment: a folder with a Python of its own, into which pip installs it once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from headrace.tools.peer_bench.peers import Peer

INSTALL_S = 1800.0
STAMP = ".installed"


class NotInstalled(Exception):
    """A peer cannot be had here. The message says why."""


def python_of(folder: Path) -> Path:
    """Return the interpreter of an environment."""
    return folder / "bin" / "python"


def installed(peer: Peer, folder: Path) -> bool:
    """Return whether an earlier run has installed these very packages."""
    try:
        return (folder / STAMP).read_text() == repr(peer.packages)
    except OSError:
        return False


def install(peer: Peer, folder: Path, *, timeout_s: float = INSTALL_S) -> None:
    """Install a peer, unless that was done before. What pip does is in `pip.log` there. Raises NotInstalled."""
    if installed(peer, folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=timeout_s, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotInstalled(f"no environment could be made in {folder}: {error}") from error
    for choices in peer.packages:
        if not any(_pip(folder, words, timeout_s) for words in choices):
            raise NotInstalled(f"pip could not install {' '.join(choices[-1])}: see {folder / 'pip.log'}")
    (folder / STAMP).write_text(repr(peer.packages))


def _pip(folder: Path, words: tuple[str, ...], timeout_s: float) -> bool:
    command = [str(python_of(folder)), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", *words]
    with (folder / "pip.log").open("ab") as log:
        try:
            return (
                subprocess.run(
                    command, check=False, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=timeout_s
                ).returncode
                == 0
            )
        except subprocess.TimeoutExpired:
            return False
