"""What the metadata promises of the Pythons that are tried, and what a pure wheel leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.package.interpreters import MINORS

ROOT = Path(__file__).parents[4]


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
def test_the_pure_wheel_leaves_compiled_modules_out(pure: str, modules: int) -> None:
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
