"""Reads and writes W3C trace contexts: the headers `traceparent` and `tracestate`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from random import Random

import msgspec

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")
_STATE = re.compile(r"[\x20-\x7e]*\Z")
MOST_STATE = 512  # characters: a longer one is dropped, as the recommendation allows
SAMPLED = 0x01

_bits = Random().getrandbits  # noqa: S311  # seeded by the system; ids are no secrets


class TraceContext(msgspec.Struct, frozen=True):
    """A place in a trace. `span` is the caller's span, or 0 where the trace begins here."""

    trace: int
    span: int
    sampled: bool
    state: str = ""

    def headers(self, span: int) -> dict[str, str]:
        """Return the headers that make what they are sent to a child of `span`."""
        flags = SAMPLED if self.sampled else 0
        headers = {"traceparent": f"00-{self.trace:032x}-{span:016x}-{flags:02x}"}
        return headers | {"tracestate": self.state} if self.state else headers


def read_context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Return the context in the headers of a request; None without one, or for one that is not well-formed."""
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    if len(parents) != 1:
        return None
    found = _PARENT.match(parents[0].decode("latin-1"))
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace, span = int(found[2], 16), int(found[3], 16)
    if not trace or not span:
        return None
    state = b",".join(states).decode("latin-1").strip()
    if len(state) > MOST_STATE or not _STATE.match(state):
        state = ""
    return TraceContext(trace, span, bool(int(found[4], 16) & SAMPLED), state)


def new_span_id() -> int:
    """Return 64 random bits that are not 0."""
    return _bits(64) or 1


def new_context(share: float) -> TraceContext:
    """Begin a trace, sampled with probability `share`."""
    trace = _bits(128) or 1
    return TraceContext(trace, 0, (trace & (2**56 - 1)) < share * 2**56)
