"""The locks of what `make` installs: they have what Headrace requires, with digests, and pip is told to compare them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy import install
from deploy.package.locks import LOCKS, versions

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def entries(name: str) -> list[str]:
    text = (ROOT / "deploy" / "locks" / f"{name}.txt").read_text()
    return re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("name", LOCKS)
def test_everything_that_is_required_is_locked_in_its_range(name: str) -> None:
    lock, found = LOCKS[name], versions(name)
    extras = [one for extra in lock.extras for one in PROJECT["optional-dependencies"][extra]]
    for text in lock.alone or [*PROJECT["dependencies"], *extras]:
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


def test_pip_is_told_to_compare_the_digests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # nothing is installed here
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(install, "watched", lambda command, *, check: bool(asked.append(command)) or True)
    monkeypatch.setattr(install, "run", lambda *_, **__: True)
    monkeypatch.setattr(install, "locked", lambda: True)
    for gpu in (False, True):
        monkeypatch.setattr(install, "has_gpu", lambda gpu=gpu: gpu)
        monkeypatch.setattr(install, "install", lambda layer: None)
        for layer in ("base", "test", "engine", "sglang", "nixl", "diffusion", "fuzz"):
            install.LAYERS[layer][2]()
    compared = {str(command[-1]) for command in asked if "--require-hashes" in command}
    assert compared == {f"deploy/locks/{name}.txt" for name in LOCKS}
    assert all(
        "--no-deps" in command for command in asked if "--require-hashes" in command and "base.txt" not in str(command[-1])
    )
