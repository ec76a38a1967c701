"""`headrace planner profile` beside a `headrace up` whose simulator has known speeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.planner.command import read_profile
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(240)]


def profile(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "headrace", "planner", "profile", *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


def test_a_profile_has_the_speeds_of_the_engine_and_says_what_it_was_not_shown(tmp_path: Path) -> None:
    up = RunningUp(tmp_path, "--engine-arg", "timing=cpu-small")
    try:
        up.until_ready()
        url, out = up.state()["url"], tmp_path / "speeds.json"
        done = profile(tmp_path, url, "--streams", "1,8", "--words", "16,64", "--seconds", "4", "--out", str(out))
        assert done.returncode == 0, done.stderr
        found = read_profile(str(out))["aggregated"]
        # the simulator's steps take at least what its timing says: 21 ms, 1.16 ms a prompt token, 0.7 ms a sequence
        assert 0.015 < found.base_s < 0.2
        assert 0.0006 < found.prefill_s < 0.02
        assert "8 streams, prompts of 64 words" in done.stderr

        alone = profile(tmp_path, url, "--streams", "1", "--words", "16", "--seconds", "15")
        assert alone.returncode == 0, alone.stderr
        assert "1 to 1 sequences" in alone.stderr

        for flags, said in (
            ((url, "--model", "nope"), "no worker serves nope"),
            (("--listen", "--seconds", "0.5"), "too few engine steps were reported"),
            (("http://127.0.0.1:9",), "does not list its models"),
        ):
            refused = profile(tmp_path, *flags)
            assert refused.returncode != 0
            assert said in refused.stderr
    finally:
        up.stop()
