"""Fuzzes one decoder, guided by coverage: `python -m tests.fuzz TARGET [libFuzzer options]`. Needs the package atheris.

Without a target each one is fuzzed in a process of its own, for FUZZ_S seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


def main() -> None:
    if len(sys.argv) < 2:
        every_target()
        return
    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports(include=["headrace"]):
        from tests.fuzz.targets import TARGETS
    if sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz [TARGET [libFuzzer options]]; targets: {', '.join(TARGETS)}")
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup([*sys.argv, str(CORPUS / target.__name__)], target)
    atheris.Fuzz()


def every_target() -> None:
    for name in sorted(corpus.name for corpus in CORPUS.iterdir()):
        with tempfile.TemporaryDirectory() as found:
            limits = (f"-max_total_time={os.environ.get('FUZZ_S') or 5}", "-artifact_prefix=.venv/fuzz/found-")
            command = [sys.executable, "-m", "tests.fuzz", name, found, *limits]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{name:14}{done.stderr.strip().rpartition(chr(10))[2]}", flush=True)
        if done.returncode:
            sys.exit(done.stderr)


main()
