"""Reads completion windows: OpenAI's `24h`, and others from a minute to seven days, such as `30m`, `2h` and `7d`."""

from __future__ import annotations

import re

from headrace.jetstream.topology import LONGEST_DEADLINE_S

SHORTEST_S = 60

_FORM = re.compile(r"([0-9]{1,6})([smhd])\Z")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def window_s(value: str) -> int:
    """Return a completion window in seconds. Raises ValueError naming it."""
    form = _FORM.match(value)
    length = int(form[1]) * _UNITS[form[2]] if form else 0
    if not SHORTEST_S <= length <= LONGEST_DEADLINE_S:
        raise ValueError(f"completion_window is {value[:40]!r}; it can be 24h, or a number of s, m, h or d from 1m to 7d")
    return length
