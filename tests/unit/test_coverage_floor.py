"""The floor of coverage may only rise."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOOR = re.compile(r"^[+ ]?COVERAGE_FLOOR := (\d+)$", re.MULTILINE)


def highest(history: str) -> int:
    """Return the highest floor that a history of the Makefile, as patches, has set."""
    return max((int(found) for found in FLOOR.findall(history)), default=0)


def test_no_earlier_makefile_asked_for_more() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the history is not here")
    command = ["git", "log", "--format=", "--patch", "-G", "COVERAGE_FLOOR", "--", "Makefile"]
    history = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert highest((ROOT / "Makefile").read_text()) >= highest(history)


def test_the_highest_floor_of_a_history_is_found() -> None:
    assert highest("-COVERAGE_FLOOR := 80\n+COVERAGE_FLOOR := 76\n@@\n+COVERAGE_FLOOR := 79\n") == 79


def test_ci_runs_all_tests_and_so_compares_the_floor() -> None:
    """With ARGS, which may leave tests out, `make test-unit` does not."""
    assert "ARGS=" not in (ROOT / ".ci" / "run").read_text()
