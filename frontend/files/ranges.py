"""Reads the `Range` header of a request (RFC 9110) for a body of a known size."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.frontend.errors import FrontendError

_ONE = re.compile(r"\s*bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*\Z", re.IGNORECASE)


class RangeUnsatisfiable(FrontendError, status=416, code="range_not_satisfiable"):
    """The wanted range lies behind the end of the file."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a body of `total` bytes."""

    offset: int
    length: int
    total: int

    @property
    def header(self) -> str:
        """The value of `Content-Range`."""
        return f"bytes {self.offset}-{self.offset + self.length - 1}/{self.total}"


def span_of(header: str | None, total: int) -> Span | None:
    """Return the wanted part, None for the whole body, also where several ranges or other units are asked for.

    Raises RangeUnsatisfiable.
    """
    found = _ONE.match(header) if header is not None else None
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        length = min(int(last), total)
        offset = total - length
    else:
        offset = int(first)
        if last and int(last) < offset:
            return None
        length = min(int(last) + 1 if last else total, total) - offset
    if length <= 0:
        raise RangeUnsatisfiable(
            f"the file has {total} bytes; the range {(header or '')[:100]!r} has none of them", param="range"
        )
    return Span(offset, length, total)
