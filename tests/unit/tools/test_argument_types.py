"""Numbers on the command lines of the tools."""

from __future__ import annotations

import argparse

import pytest

from headrace.tools.argument_types import count, positive


def test_numbers_are_read() -> None:
    assert (count("12"), positive("0.5")) == (12, 0.5)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "many"])
def test_what_is_no_count_is_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is no number from 1 on"):
        count(text)


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "", "fast"])
def test_what_is_not_positive_is_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is no number above 0"):
        positive(text)
