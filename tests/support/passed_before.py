"""Leaves out what has passed in an earlier run on the same tree, as `.ci/run` does: nothing need pass twice in one interpreter.

TESTS_RECORD_PASSED names the file that a run without xdist writes at its end, TESTS_PASSED_BEFORE the folder with such
files whose tests a later run leaves out.  A search that tried a fifth of its examples (`examples`) has not passed, and neither
has what was skipped, nor anything in a run that was cut short: a later run has all of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support import examples

RECORD = "TESTS_RECORD_PASSED"
BEFORE = "TESTS_PASSED_BEFORE"


class Recorder:
    """Gathers the tests of a run that passed, and writes them down once it is over."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._shortened: set[str] = set()
        self._outcomes: dict[str, set[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if settings.get_current_profile_name() == examples.FAST:
            self._shortened = {item.nodeid for item in session.items if examples.is_search(item)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.setdefault(report.nodeid, set()).add(report.outcome)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        passed = [name for name, outcomes in self._outcomes.items() if outcomes == {"passed"} and name not in self._shortened]
        self._file.write_text("".join(f"{name}\n" for name in passed))


class LeftOut:
    """Deselects the tests that are named in the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = {line for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        gone = [item for item in items if item.nodeid in self._names]
        if gone:
            config.hook.pytest_deselected(items=gone)
            items[:] = [item for item in items if item.nodeid not in self._names]

    def pytest_report_header(self) -> str:
        return f"left out: the {len(self._names)} tests that have passed before, as {self._folder} has them"


def configure(config: pytest.Config) -> None:
    """Register what the environment asks for. What a test starts is not asked."""
    plugins: dict[str, Any] = {RECORD: Recorder, BEFORE: LeftOut}
    for variable, plugin in plugins.items():
        if path := os.environ.get(variable):
            if variable == RECORD:
                del os.environ[variable]
            config.pluginmanager.register(plugin(Path(path)), variable)
