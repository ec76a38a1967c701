"""How many examples Hypothesis tries: 50 or as many as a test asks for, or a fifth of them in `make test-fast`'s profile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

FAST = "fast"
SHARE = 5  # one in so many
FEWEST = 5

# Tests hold no times: a busy machine would fail them.
settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile(FAST, deadline=None, max_examples=50)
settings.load_profile("default")


def fewer(full: settings) -> settings:
    """The same settings with fewer examples."""
    return settings(full, max_examples=min(full.max_examples, max(FEWEST, full.max_examples // SHARE)))


def shorten(items: Iterable[pytest.Item]) -> None:
    """Has every search among the tests try fewer examples; searches inside of a test's body are left as they are."""
    done: set[int] = set()
    for item in items:
        test: Any = getattr(item, "obj", None)
        if (machine := _machine(item)) is not None:
            if id(machine) not in done:
                machine.settings = fewer(machine.settings)
                done.add(id(machine))
        elif is_hypothesis_test(test):
            test = getattr(test, "__func__", test)
            if id(test) not in done:  # the parameters of a test share it
                test._hypothesis_internal_use_settings = fewer(test._hypothesis_internal_use_settings)
                done.add(id(test))


def _machine(item: pytest.Item) -> Any:
    """Return the class of a stateful search."""
    machine: Any = getattr(item, "cls", None)
    return machine if machine is not None and isinstance(machine.__dict__.get("settings"), settings) else None
