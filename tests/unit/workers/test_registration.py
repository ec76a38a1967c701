"""A worker knows how long its start took."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.workers.registration import process_age_s

CHILD = "import time; time.sleep(0.3); from headrace.workers.registration import process_age_s; print(process_age_s())"


def test_the_age_counts_from_the_start_of_the_process() -> None:
    began = time.monotonic()
    told = subprocess.run([sys.executable, "-P", "-c", CHILD], check=True, capture_output=True, text=True, timeout=60).stdout
    assert 0.29 <= float(told) <= time.monotonic() - began + 0.02  # ticks of 0.01 s


@pytest.mark.parametrize("text", [None, "", "1 (x) S 2", "1 (x) S " + "word " * 30])
def test_where_the_kernel_does_not_tell_it_is_0(tmp_path: Path, text: str | None) -> None:
    stat = tmp_path / "stat"
    if text is not None:
        stat.write_text(text)
    assert process_age_s(stat) == 0.0
