from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.base.errors import SettingsError
from headrace.up import worker_python as module
from headrace.up.worker_python import worker_python


@pytest.fixture
def _nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)


@pytest.mark.usefixtures("_nothing_is_installed")
def test_an_engine_may_have_an_environment_beside_this_one(tmp_path: Path) -> None:
    own = tmp_path / ".venv-sglang" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert worker_python("sglang", prefix=str(tmp_path / ".venv")) == str(own)


@pytest.mark.usefixtures("_nothing_is_installed")
def test_an_engine_that_is_installed_nowhere_is_named_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'sglang'.*\.venv-sglang/bin/python"):
        worker_python("sglang", prefix=str(tmp_path / ".venv"))


@pytest.mark.usefixtures("_nothing_is_installed")
def test_other_engines_run_in_this_environment() -> None:
    assert worker_python("sim") == worker_python("my:Engine") == sys.executable


def test_an_engine_that_is_installed_here_runs_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    assert worker_python("sglang", prefix=str(tmp_path)) == sys.executable
