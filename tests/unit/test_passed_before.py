"""A later run leaves out what has passed before, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import passed_before

ROOT = Path(__file__).resolve().parents[2]

CONFTEST = """
from hypothesis import settings
from tests.support import examples, passed_before

def pytest_configure(config):
    passed_before.configure(config)
"""
TESTS = """
import os
import pytest
from hypothesis import given, strategies
from hypothesis.stateful import RuleBasedStateMachine, rule

def test_passes():
    assert "TESTS_RECORD_PASSED" not in os.environ  # or a pytest that it starts would write there, too

@pytest.mark.parametrize("text", ["a b", "c/d"])
def test_passes_for(text):
    pass

def test_fails():
    assert False

@pytest.fixture
def broken():
    yield
    assert False

def test_passes_and_is_not_cleaned_up(broken):
    pass

@pytest.mark.skip(reason="not today")
def test_is_skipped():
    pass

@given(strategies.integers())
def test_search(value):
    pass

class Machine(RuleBasedStateMachine):
    @rule()
    def step(self):
        pass

TestSteps = Machine.TestCase
"""
PASSED = ["test_it.py::test_passes", "test_it.py::test_passes_for[a b]", "test_it.py::test_passes_for[c/d]"]
SEARCHES = ["test_it.py::test_search", "test_it.py::TestSteps::runTest"]
OTHERS = ["test_it.py::test_fails", "test_it.py::test_passes_and_is_not_cleaned_up", "test_it.py::test_is_skipped"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    return folder


def run(project: Path, *options: str, **variables: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={project}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, check=False, cwd=project, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize(("profile", "recorded"), [("fast", PASSED), ("default", PASSED + SEARCHES)])
def test_what_has_passed_in_full_is_written_down_and_left_out(
    project: Path, tmp_path: Path, profile: str, recorded: list[str]
) -> None:
    before = tmp_path / "passed"
    before.mkdir()
    run(project, f"--hypothesis-profile={profile}", TESTS_RECORD_PASSED=str(before / "unit"))
    assert (before / "unit").read_text().splitlines() == recorded
    told = run(project, "-v", TESTS_PASSED_BEFORE=str(before))
    assert f"left out: the {len(recorded)} tests that have passed before" in told
    again = {word for line in told.splitlines() for word in (line.split(" ")[0],) if word.startswith("test_it.py::")}
    assert again == {*OTHERS, *PASSED, *SEARCHES} - {*recorded}


def test_a_run_that_was_cut_short_writes_nothing_down(project: Path, tmp_path: Path) -> None:
    (project / "test_it.py").write_text(TESTS.replace("assert False", "raise KeyboardInterrupt"))
    run(project, TESTS_RECORD_PASSED=str(tmp_path / "unit"))
    assert not (tmp_path / "unit").exists()


def test_ci_leaves_out_what_its_own_runs_have_passed() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert passed_before.RECORD in script
    assert passed_before.BEFORE in script


def test_ci_does_not_try_again_what_failed_in_virtual_time() -> None:
    """`make test` keeps such failures apart, where the second try does not look."""
    words = "virtual time: failed"
    assert f"'{words}'" in (ROOT / "Makefile").read_text()
    assert f"grep -q '^{words}'" in (ROOT / ".ci" / "run").read_text()
