"""docs/operations.md and docs/settings.md say what the code does."""

from __future__ import annotations

from headrace.base import errors
from headrace.config.options import OTHER_ENV
from tests.docs.blocks import ROOT
from tests.docs.settings_table import FILE, with_table


def test_the_tables_of_settings_are_up_to_date() -> None:
    text = FILE.read_text()
    assert text == with_table(text), "run: python -m tests.docs.settings_table"


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    for name in dir(errors):
        if name.startswith("EXIT_"):
            assert f"| {getattr(errors, name)} |" in text, name


def test_every_other_variable_is_documented() -> None:
    text = FILE.read_text()
    for name in OTHER_ENV:
        assert name in text
