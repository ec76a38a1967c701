"""What all messages share: the version, and how records are encoded."""

from __future__ import annotations

import msgspec

WIRE_VERSION = 1


class Record(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of all map messages."""

    v: int = msgspec.field(default_factory=lambda: WIRE_VERSION)  # a factory, so that omit_defaults never leaves it out
