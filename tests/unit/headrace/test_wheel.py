"""The files that are installed: all modules and assets, in one import package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

FOLDERS = ("broker", "frontend", "jetstream", "router", "tools", "workers")

# As the build backend does: the file list of `build_py`, without compiling and without writing into the tree.
SCRIPT = """
import sys
from setuptools import Distribution

distribution = Distribution({"script_name": "setup.py"})
distribution.parse_config_files()
distribution.get_command_obj("egg_info").egg_base = sys.argv[1]
command = distribution.get_command_obj("build_py")
command.build_lib = "wheel"
command.ensure_finalized()
print("\\n".join(command.get_outputs(include_bytecode=False)))
"""


def sources() -> set[str]:
    """Modules and assets of the tree, by the paths that they are installed under."""
    found = {"headrace/py.typed", *(f"headrace/{folder}/py.typed" for folder in FOLDERS)}
    for folder in (*FOLDERS, "headrace"):
        for file in (ROOT / folder).rglob("*"):  # links are not followed
            path = file.relative_to(ROOT)
            if file.is_file() and "__pycache__" not in path.parts and (file.suffix == ".py" or "assets" in path.parts):
                found.add(str(path) if folder == "headrace" else f"headrace/{path}")
    return found


@pytest.mark.slow
def test_a_wheel_has_all_modules_and_assets_and_only_our_package(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")  # the least that can read pyproject.toml
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    installed = {line.removeprefix("wheel/") for line in done.stdout.splitlines() if line.startswith("wheel/")}
    assert {path.split("/")[0] for path in installed} == {"headrace"}
    assert not sources() - installed
    assert not {path for path in installed if path.endswith(".py")} - sources()
