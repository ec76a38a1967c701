"""The unit tests on other Pythons: which are asked, and what a failed run says. Scripts play uv and the Pythons."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.package import unit_tests as subject
from deploy.package.unit_tests import main, run_tests

# plays `uv venv` by laying a Python into the new environment; other commands of uv are written down
UV = """#!/bin/sh
[ "$1" = venv ] || {{ echo "$@" >>{log}; exit {code}; }}
for folder; do :; done
mkdir -p "$folder/bin"
ln -s "$4" "$folder/bin/python"
"""


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def uv(folder: Path, code: int = 0) -> str:
    return script(folder / "uv", UV.format(log=folder / "asked", code=code))


def python(folder: Path, code: int, name: str = "python") -> str:
    return script(folder / name, f'#!/bin/sh\necho "$@"\necho "{name} ran"\nexit {code}\n')


def test_a_run_whose_installation_fails_is_a_failure_with_what_was_said(tmp_path: Path) -> None:
    run = run_tests(uv(tmp_path, code=5), 12, python(tmp_path, 0), tmp_path / "new", [])
    assert not run.passed
    assert "python ran" not in run.output


@pytest.mark.slow
def test_a_run_that_takes_too_long_fails_with_what_it_had_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_TESTS_S", 2.0)
    slow = script(tmp_path / "python", "#!/bin/sh\necho begun\nexec sleep 60\n")
    run = run_tests(uv(tmp_path), 12, slow, tmp_path / "new", [])
    assert not run.passed
    assert run.output.startswith("begun\n")
    assert "took longer than 2 s" in run.output


def test_one_python_that_fails_fails_all_and_those_that_are_not_here_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = subject.sys.version_info.minor
    first, second = (minor for minor in (11, 12, 13) if minor != own)
    here = {own: "/nowhere", first: python(tmp_path, 0, "good"), second: python(tmp_path, 1, "bad")}
    monkeypatch.setattr(subject, "installed_interpreters", lambda: here)
    assert main([uv(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"Python 3.{first}: good ran" in out
    assert f"Python 3.{second}: bad ran" in out
    assert "not tried" not in out
    del here[second]
    assert main([uv(tmp_path)]) == 0
    assert f"not tried, since not installed here: Python 3.{second}\n" in capsys.readouterr().out
