from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

from headrace.workers.sglang.cpu_plugin.missing_packages import NotInstalled, stand_in

NAME = "headrace_no_such_package"


@pytest.fixture
def absent() -> Iterator[None]:
    before, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = before
    for name in set(sys.modules) - modules:
        if name.startswith(NAME):
            del sys.modules[name]


@pytest.mark.usefixtures("absent")
def test_a_missing_package_can_be_imported_derived_from_and_decorate_but_not_be_called() -> None:
    assert stand_in((NAME, "json")) == (NAME,)
    module = importlib.import_module(f"{NAME}.deep.inside")

    class Derived(module.Base):  # type: ignore[misc,name-defined]  # there is no such class
        def __init__(self, size: int) -> None:
            self.size = size

    @module.register
    def decorated() -> int:
        return 3

    assert Derived(2).size == 2
    assert decorated() == 3
    with pytest.raises(NotInstalled, match=f"{NAME}.deep.inside.kernel"):
        module.kernel(1, 2)


@pytest.mark.usefixtures("absent")
def test_installed_packages_and_a_second_call_change_nothing() -> None:
    assert stand_in(("json",)) == ()
    assert stand_in((NAME,)) == (NAME,)
    assert stand_in((NAME,)) == ()


def test_nothing_stands_in_where_it_was_not_called() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)
