"""Fuzzes one decoder, guided by coverage: `python -m tests.fuzz TARGET [libFuzzer options]`. Needs the package atheris."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["headrace"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz TARGET [libFuzzer options]; targets: {', '.join(TARGETS)}")
    target = TARGETS[sys.argv.pop(1)]
    corpus = Path(__file__).parent / "corpus" / target.__name__
    atheris.Setup([*sys.argv, str(corpus)], target)
    atheris.Fuzz()


main()
