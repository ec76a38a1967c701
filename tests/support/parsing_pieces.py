"""Texts cut into pieces, and what parsers made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from headrace.broker.jobs import OutputParts
from headrace.broker.messages.frames import Part

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "What the weather is like", "parameters": PARAMETERS},
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "description": "What time it is", "parameters": None},
}


def said(parts: Iterable[Part]) -> OutputParts:
    put_together = OutputParts()
    put_together.add(parts)
    return put_together


def cut(text: str, at: Sequence[int]) -> list[str]:
    """`text` in pieces that end at these places."""
    places = [0, *sorted({place % (len(text) + 1) for place in at}), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


cuts = st.lists(st.integers(min_value=0, max_value=10_000), max_size=40)
