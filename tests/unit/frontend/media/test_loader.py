"""The names under which engines keep what they have computed of an item."""

from __future__ import annotations

from headrace.frontend.media.loader import content_name


def test_what_engines_call_an_item_by_has_128_bits() -> None:
    """Two items of one 64-bit name can be found on a laptop, and the second would get what the first one's owner computed."""
    names = {content_name(data) for data in (b"", b"a", b"b")}
    assert len(names) == 3
    assert all(len(bytes.fromhex(name)) == 16 for name in names)
