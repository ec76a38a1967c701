"""Parts of two versions understand each other: what an earlier version wrote is read today, and what is written today by it.

The messages of the earlier version were written by its own code (`tests/support/wire_samples.py`), each with every field
set. The other direction is held by names and kinds: a reader takes the fields that it knows by name, and passes by others.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest

from headrace.broker.codec import encode
from tests.support.wire_samples import FILE, kinds, sample

RECORDED: dict[str, Any] = json.loads(FILE.read_text())
EARLIER = {name: base64.b64decode(text) for name, text in RECORDED["messages"].items()}
KINDS = kinds()
GONE = object()


def lost(earlier: Any, now: Any, at: str = "") -> list[str]:
    """Name what stands in the earlier message and not, or otherwise, in the other one. More fields or items are fine."""
    pairs = _pairs(earlier, now, at)
    if pairs is None:
        return [] if earlier == now else [at]
    return [one for old, new, place in pairs for one in ([place] if new is GONE else lost(old, new, place))]


def other_kind(earlier: Any, now: Any, at: str = "") -> list[str]:
    """Name the fields that have gone, or hold values of another kind, which a reader of the earlier version would refuse."""
    pairs = _pairs(earlier, now, at)
    if pairs is None:
        return [] if type(earlier) is type(now) else [at]
    return [one for old, new, place in pairs for one in ([place] if new is GONE else other_kind(old, new, place))]


def _pairs(earlier: Any, now: Any, at: str) -> list[tuple[Any, Any, str]] | None:
    """Return what is inside of both, by key or place; None where one of them is a value of another kind."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        return [(value, now.get(key, GONE), f"{at}.{key}") for key, value in earlier.items()]
    if isinstance(earlier, list) and isinstance(now, list):
        return [(value, now[n] if n < len(now) else GONE, f"{at}[{n}]") for n, value in enumerate(earlier)]
    return None


@pytest.mark.parametrize("name", EARLIER)
def test_what_an_earlier_version_wrote_is_read_as_it_was_meant(name: str) -> None:
    message = msgspec.msgpack.decode(EARLIER[name], type=KINDS[name])
    assert lost(msgspec.msgpack.decode(EARLIER[name]), msgspec.msgpack.decode(encode(message))) == []


@pytest.mark.parametrize("name", EARLIER)
def test_what_is_written_today_has_all_that_an_earlier_version_reads(name: str) -> None:
    assert other_kind(msgspec.msgpack.decode(EARLIER[name]), msgspec.msgpack.decode(encode(sample(KINDS[name])))) == []


def test_a_field_that_is_renamed_dropped_or_of_another_kind_is_found() -> None:
    assert lost({"a": 1, "b": [1, {"c": 2}]}, {"a": 1, "b": [1, {"d": 2}], "e": 3}) == [".b[1].c"]
    assert other_kind({"a": 1, "b": "x"}, {"a": "1"}) == [".a", ".b"]
    assert other_kind([1, "a"], [1]) == ["[1]"]
    assert lost([1, 2], [1, 2, 3]) == []


def test_every_message_of_the_earlier_version_is_still_one() -> None:
    assert len(EARLIER) > 60
    assert EARLIER.keys() <= KINDS.keys()
