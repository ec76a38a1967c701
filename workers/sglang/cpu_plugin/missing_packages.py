"""Stands in for GPU packages that SGLang imports and that a machine without a GPU cannot have or does not need.

A stand-in can be imported, subclassed and used as a decorator. Calling anything of it raises, naming it: what SGLang does here
must not depend on it. `sgl_kernel.scalar_type` is the exception, as SGLang builds tables of number types from it at import.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = ("IPython", "sgl_kernel", "torchvision")
_CALLABLE = ("sgl_kernel.scalar_type",)


class NotInstalled(RuntimeError):
    """SGLang called something of a package that is not installed on this machine without a GPU."""


class _Absent(type):
    """The type of absent names: every attribute of an absent name is absent, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:  # a decorator
            return args[0]
        if cls.__name__.startswith(_CALLABLE):
            return cls
        if cls.__module__ != __name__:  # a class of SGLang's that derives from an absent one
            return super().__call__(*args, **kwargs)
        raise NotInstalled(f"{cls.__name__} is not installed here, and SGLang called it")

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def _absent(name: str) -> Any:
    return _Absent(name, (), {"__module__": __name__})


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _AbsentModule(spec.name)
        module.__version__ = "0.0"  # type: ignore[attr-defined]  # SGLang compares it
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def stand_in(packages: Sequence[str] = PACKAGES) -> tuple[str, ...]:
    """Stand in for those of the packages that are not installed, and return their names. Call it before `import sglang`."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return ()
    missing = tuple(name for name in packages if importlib.util.find_spec(name) is None)
    if missing:
        sys.meta_path.append(_Finder(frozenset(missing)))
    return missing
