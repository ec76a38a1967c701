"""Runs unit tests on every supported Python of this machine but the one that runs this, in fresh environments.

    python -m deploy.package.unit_tests UV [OPTIONS OF PYTEST]

UV is the program of the package uv. The environments hold what Headrace and its extra `test` require and no engine; the code is
that of the source tree, without the compiled prefix index. The runs go on side by side, one process each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deploy.package.interpreters import installed_interpreters, not_tried

ROOT = Path(__file__).resolve().parents[2]
_INSTALL_S = 600.0
_TESTS_S = 900.0
_TAIL = 20_000  # characters of a failed run that are printed
_NO_TESTS = 5  # what pytest ends with where the options leave no test


@dataclass(frozen=True)
class Run:
    """Result of one interpreter's tests: whether all passed, and what was printed."""

    minor: int
    passed: bool
    output: str
    seconds: float

    def report(self) -> str:
        """Return pytest's last line, after the end of its output where a test failed."""
        last = self.output.strip().rpartition("\n")[2]
        head = "" if self.passed else f"{self.output[-_TAIL:]}\n"
        return f"{head}Python 3.{self.minor}: {last} (with the installation {self.seconds:.0f} s)"


def others(pythons: dict[int, str], own_minor: int) -> dict[int, str]:
    """Return the interpreters of other minor versions than the one whose tests run anyway."""
    return {minor: python for minor, python in pythons.items() if minor != own_minor}


def run_tests(uv: str, minor: int, python: str, folder: Path, options: Sequence[str]) -> Run:
    """Install into `folder` what the tests require, and run them. A step that fails or takes too long is a failed run."""
    begun = time.monotonic()
    installed = str(folder / "bin" / "python")
    steps = (
        ([uv, "venv", "-q", "--python", python, str(folder)], _INSTALL_S, (0,)),
        ([uv, "pip", "install", "-q", "--python", str(folder), "-r", "pyproject.toml", "--extra", "test"], _INSTALL_S, (0,)),
        ([installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", *options], _TESTS_S, (0, _NO_TESTS)),
    )
    output = ""
    for command, limit_s, fine in steps:
        code, said = _run(command, limit_s)
        output += said
        if code not in fine:
            return Run(minor, False, output, time.monotonic() - begun)
    return Run(minor, True, output, time.monotonic() - begun)


def _run(command: list[str], limit_s: float) -> tuple[int | None, str]:
    """Return the exit code, None where there is none, and what was printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # for what tests start
    with tempfile.TemporaryFile("w+") as output:  # readable after a timeout too
        try:
            code: int | None = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
            output.seek(0, os.SEEK_END)
            output.write(f"{command[0]} took longer than {limit_s:g} s\n")
        output.seek(0)
        return code, output.read()


def main(arguments: list[str]) -> int:
    """Run the tests on every other Python. Returns 1 when a run failed."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    uv, *options = arguments
    own = sys.version_info.minor
    pythons = others(installed_interpreters(), own)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        started = [
            pool.submit(run_tests, uv, minor, python, Path(scratch) / f"3.{minor}", options)
            for minor, python in pythons.items()
        ]
        runs = [run.result() for run in started]
    for run in runs:
        print(run.report())
    if left := not_tried([own, *pythons]):
        print(left)
    return 0 if all(run.passed for run in runs) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
