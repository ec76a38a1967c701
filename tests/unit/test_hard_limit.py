"""A test that goes on after its time limit ends its process, and says where it stood."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import hard_limit

ROOT = Path(__file__).resolve().parents[2]

CONFTEST = """
import pytest
from tests.support import hard_limit

hard_limit.MORE_S = 0.5

def pytest_configure(config):
    hard_limit.configure(config)

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with hard_limit.limited(item):
        return (yield)

@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node):
    hard_limit.again(node)
"""
STUCK = """
import time
import pytest

def test_before():
    pass

@pytest.mark.timeout(0.5)
def test_stuck():
    try:
        time.sleep(60)
    finally:
        time.sleep(60)
"""


FAILED = """
import time
import pytest

@pytest.fixture
def left():
    yield
    time.sleep(60)

@pytest.mark.timeout(0.5)
def test_fails(left):
    assert False
"""


@pytest.mark.parametrize(("test", "place"), [(STUCK, "line 13 in test_stuck"), (FAILED, "line 8 in left")])
def test_the_run_of_a_test_that_cannot_end_is_over_and_names_the_line(test: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_stuck.py").write_text(test)
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    ended = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1
    assert f'test_stuck.py", {place}' in ended.stderr + ended.stdout


@pytest.mark.timeout(7)
def test_the_limit_is_that_of_the_nearest_mark(request: pytest.FixtureRequest) -> None:
    assert hard_limit.limit_of(request.node) == 7.0


def test_without_a_mark_the_limit_is_that_of_the_configuration(request: pytest.FixtureRequest) -> None:
    assert hard_limit.limit_of(request.node) == 120.0
