"""The lock of what `make install` installs: it has what Headrace requires, with digests, and pip is told to compare them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = "deploy/locks/base.txt"
ENTRIES = re.sub(r"^#.*\n", "", (ROOT / LOCK).read_text(), flags=re.MULTILINE).replace("\\\n", " ").splitlines()


def locked() -> dict[str, list[str]]:
    """The versions of each package; several where they differ by Python version."""
    found: dict[str, list[str]] = {}
    for entry in ENTRIES:
        requirement = Requirement(entry.partition(" --hash")[0])
        (version,) = (one.version for one in requirement.specifier)
        found.setdefault(canonicalize_name(requirement.name), []).append(version)
    return found


def test_everything_that_headrace_requires_is_locked_in_its_range() -> None:
    versions = locked()
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        requirement = Requirement(text)
        found = versions.get(canonicalize_name(requirement.name))
        assert found, f"{text} is not in {LOCK}: run `make lock`"
        assert all(requirement.specifier.contains(version) for version in found), f"{text}: {found}; run `make lock`"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.partition("==")[0])
def test_each_locked_package_has_digests_and_names_no_place(entry: str) -> None:
    assert re.search(r" --hash=sha256:[0-9a-f]{64}(\s|$)", entry)
    assert "://" not in entry
    assert "@" not in entry


def test_pip_is_told_to_compare_the_digests() -> None:
    base = (ROOT / "Makefile").read_text().partition("$(VENV)/.base:")[2].partition("\n\n")[0]
    assert "--require-hashes -r $(LOCK)" in base
    assert "--no-deps -e ." in base
