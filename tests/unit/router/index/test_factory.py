"""Which index runs, the compiled or the pure one."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from headrace.router.errors import SettingsInvalid
from headrace.router.index import view as create_module
from headrace.router.index.view import create_index


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(create_module.IMPLEMENTATION_VARIABLE, raising=False)


def test_pure_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert create_index("pure").implementation == "pure"
    monkeypatch.setenv(create_module.IMPLEMENTATION_VARIABLE, "pure")
    assert create_index().implementation == "pure"


@pytest.mark.parametrize("wrong", ["fast", "PURE"])
def test_other_names_are_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    with pytest.raises(SettingsInvalid, match=wrong):
        create_index(wrong)  # type: ignore[arg-type]
    monkeypatch.setenv(create_module.IMPLEMENTATION_VARIABLE, wrong)
    with pytest.raises(SettingsInvalid, match=wrong):
        create_index()


def test_negative_limit_is_refused() -> None:
    with pytest.raises(SettingsInvalid, match="-1"):
        create_index(max_entries=-1)


class _Mismatched(types.ModuleType):
    """What is left of an extension whose parts were built at different times."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("Holders size changed")


@pytest.mark.parametrize("module", [None, _Mismatched("headrace.router.index._table")], ids=["absent", "mismatched"])
def test_without_the_extension_the_pure_one_runs(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None) -> None:
    monkeypatch.setitem(sys.modules, "headrace.router.index._table", module)
    assert create_index().implementation == "pure"
    with pytest.raises(SettingsInvalid, match="not built"):
        create_index("compiled")
