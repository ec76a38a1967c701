"""Registers the rules that can be taken out of force, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Guard = Callable[[pytest.MonkeyPatch], None]
GUARDS: dict[str, Guard] = {}


def guard(function: Guard) -> Guard:
    GUARDS[function.__name__] = function
    return function
