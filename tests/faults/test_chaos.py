"""A minute of `headrace chaos` as a user runs it: the account must hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.timeout(650)]

RIGHT = ("lost", "failed", "wrong", "duplicated", "missing")


def test_faults_of_every_kind_lose_nothing_and_leave_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "headrace", "chaos", "--minutes", "1", "--seed", "1", "--json"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "run")], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert (done.returncode, told["broken"]) == (0, []), done.stderr
    assert {name: told["outcomes"][name] for name in RIGHT} == dict.fromkeys(RIGHT, 0)
    assert told["outcomes"]["answered"] > 0
    assert sum(told["faults"].values()) > 0
    assert not any(told["residue"].values())
