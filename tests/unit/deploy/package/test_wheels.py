"""Which Pythons wheels are built for and tried on, and what the metadata promises of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.package.wheels import MINORS, interpreters

ROOT = Path(__file__).parents[4]


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


def test_the_metadata_names_the_pythons_that_are_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        line.rpartition(" ")[2] for line in project["classifiers"] if line.startswith("Programming Language :: Python :: 3.")
    }
    assert named == {f"3.{minor}" for minor in MINORS}
    assert project["requires-python"] == f">=3.{min(MINORS)}"
    assert "Typing :: Typed" in project["classifiers"]


@pytest.mark.slow
@pytest.mark.parametrize(("pure", "modules"), [("1", 0), ("", 3)])
def test_the_pure_wheel_leaves_the_compiled_index_out(pure: str, modules: int) -> None:
    pytest.importorskip("setuptools", minversion="77")
    script = (
        "import os, runpy, setuptools; setuptools.setup = lambda distclass: made.append(distclass); made = []\n"
        "runpy.run_path('setup.py'); distribution = made[0]({'script_name': 'setup.py'}); distribution.parse_config_files()\n"
        "print(len(distribution.ext_modules or ()), bool(distribution.has_ext_modules()))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=ROOT,
        env={**os.environ, "HEADRACE_PURE": pure},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(modules), str(bool(modules))]
