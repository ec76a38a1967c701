"""Completion windows are a number and a unit."""

import pytest

from headrace.broker.batches.windows import window_s


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86_400), ("30m", 1800), ("2h", 7200), ("7d", 604_800), ("60s", 60)])
def test_a_window_is_read(text: str, seconds: int) -> None:
    assert window_s(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "59s", "8d", "-1h", "1.5h", "24h ", "24H", "99999999d", "²h"])
def test_another_window_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="completion_window is") as error:
        window_s(text)
    assert repr(text[:40]) in str(error.value)
