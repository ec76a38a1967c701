"""The engine contract: what every engine must do, as tests that a file per engine runs against that engine.

A file of tests gives a fixture `subject` (a started engine, `headrace.workers.kit.EngineSupport` and what the
tests need besides) and a class that derives from the classes here. Whatever is declared must work, and whatever is not declared
must be refused by name: a test of an ability takes one of the two ways, by what the started engine declares.
"""

from __future__ import annotations

import pkgutil

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
