"""Defines the base of all messages: the version field, and the encoding of records as maps."""

from __future__ import annotations

import msgspec

WIRE_VERSION = 1


class Record(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of all messages that are maps."""

    v: int = msgspec.field(default_factory=lambda: WIRE_VERSION)  # a factory, so that omit_defaults never leaves it out
