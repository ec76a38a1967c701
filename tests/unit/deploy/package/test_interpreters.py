"""Which Pythons wheels are built for and tests are run on."""

from __future__ import annotations

import os
from pathlib import Path

from deploy.package.interpreters import interpreters, not_tried


def program(path: Path, minor: int | None) -> None:
    """An interpreter that says its minor version, or a shim that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\nexit 127\n" if minor is None else f"#!/bin/sh\necho {minor}\n")
    path.chmod(0o755)


def test_programs_on_the_path_win_and_shims_that_fail_do_not_count(tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    program(tmp_path / "bin" / "python3.11", 11)
    program(tmp_path / "bin" / "python3.12", None)
    program(versions / "3.11.9" / "bin" / "python3", 11)
    program(versions / "3.12.1" / "bin" / "python3", 12)
    program(versions / "3.13.0" / "bin" / "python3", None)
    path = f"{tmp_path / 'bin'}{os.pathsep}/usr/bin"
    assert interpreters(path, versions) | {13: ""} == {
        11: str(tmp_path / "bin" / "python3.11"),
        12: str(versions / "3.12.1" / "bin" / "python3"),
        13: "",
    }


def test_supported_pythons_that_are_not_here_are_named() -> None:
    assert not_tried([11]) == "not tried, since not installed here: Python 3.12, 3.13"
    assert not_tried([13, 11, 12]) == ""
