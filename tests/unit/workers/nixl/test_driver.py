"""Finding NIXL, or saying that it is not there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.nixl import driver
from headrace.workers.nixl.descriptors import NixlUnavailable


def installed(monkeypatch: pytest.MonkeyPatch, *wheels: str) -> None:
    """Pretend that these wheels are installed, each with bindings named after it."""
    monkeypatch.setattr(driver, "find_spec", lambda name: SimpleNamespace() if name in wheels else None)
    for wheel in (*wheels, "nixl"):
        module = ModuleType(wheel)
        module._bindings = wheel  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, wheel, module)
        monkeypatch.setitem(sys.modules, f"{wheel}._bindings", SimpleNamespace(wheel=wheel))


def test_the_only_wheel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "nixl_cu12")
    assert driver.bindings().wheel == "nixl_cu12"


def test_among_several_wheels_nixl_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "nixl_cu12", "nixl_cu13")
    assert driver.bindings() == "nixl"


def test_without_nixl_the_start_fails_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(NixlUnavailable, match="make install MODE=disagg") as caught:
        driver.bindings()
    assert isinstance(caught.value, EngineStartFailed)
