"""Keeps a copy of the working tree, from which remedies are taken out, so that the tree itself stays as it is."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.attacks.attempt import Cut

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
MEMORY = 3 * 1024**3  # of unit tests: without a remedy some attacks take all there is


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run of tests. `why` is the error of the first that failed, empty where all passed."""

    passed: bool
    why: str
    took_s: float


class ScratchTree:
    """A copy of the files of the working tree, with the compiled index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written_at = time.time()
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        names = [name for name in listed.stdout.decode().split("\0") if name]
        names += [str(path.relative_to(ROOT)) for path in (ROOT / "router" / "index").glob("*.so")]
        for name in names:
            source, target = ROOT / name, folder / name
            if os.path.lexists(source):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)

    @contextlib.contextmanager
    def without(self, cuts: Sequence[Cut]) -> Iterator[None]:
        """Take remedies out for the time of the block. Raises ValueError for a cut that does not fit once."""
        before: dict[Path, str] = {}
        try:
            for cut in cuts:
                path = self._folder / cut.file
                text = path.read_text()
                before.setdefault(path, text)
                if text.count(cut.old) != 1:
                    raise ValueError(f"{cut.file} has {text.count(cut.old)} times: {cut.old}")
                self._write(path, text.replace(cut.old, cut.new))
            yield
        finally:
            for path, text in before.items():
                self._write(path, text)

    def run(self, test: str) -> Outcome:
        """Run one test by its name below `tests/`."""
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--color=no", f"tests/{test}"]
        try:
            done = subprocess.run(
                command,
                cwd=self._folder,
                env={**os.environ, "PYTHONPATH": str(self._folder)},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
                preexec_fn=_limited if test.startswith("unit/") else None,
            )
        except subprocess.TimeoutExpired:
            return Outcome(False, f"no end within {LIMIT_S:g} s", LIMIT_S)
        return Outcome(done.returncode == 0, _reason(done.stdout, done.returncode), time.monotonic() - began)

    def _write(self, path: Path, text: str) -> None:
        """Write a file with a time of its own: compiled code is known by size and second."""
        path.write_text(text)
        self._written_at += 1.0
        os.utime(path, (self._written_at, self._written_at))


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _reason(output: str, code: int) -> str:
    if code == 0:
        return ""
    lines = output.splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E  ")]
    named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return " | ".join((errors or named or lines[-1:] or ["nothing was said"])[:4])[:400]
