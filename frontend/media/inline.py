"""Decodes bytes inside a request: `data:` URLs and base64 text."""

from __future__ import annotations

import binascii
import re
from urllib.parse import unquote_to_bytes

_HEADER = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<params>(?:;[\w.+-]+=[\w.+-]+)*)(?P<base64>;base64)?\Z")
_MAX_HEADER = 256  # characters before the comma
_SLICE = 1 << 20  # characters decoded at a time, so that other threads can run in between


class Malformed(ValueError):
    """The text is not base64 or not a data URL. The message has the reason."""


class TooMuch(ValueError):
    """The data exceeds the limit."""


def decode_data_url(url: str, *, limit: int) -> bytes:
    """Decode a data URL. Takes milliseconds for large ones. Raises Malformed, TooMuch."""
    comma = url.find(",", 0, _MAX_HEADER)
    header = _HEADER.match(url[:comma]) if comma >= 0 else None
    if header is None:
        raise Malformed("not a data URL: expected data:<type>;base64,<data>")
    if header["base64"]:
        return decode_base64(url, start=comma + 1, limit=limit)
    if len(url) - comma > 3 * limit:
        raise TooMuch(f"more than the {limit} bytes that are taken")
    data = unquote_to_bytes(url[comma + 1 :])
    if len(data) > limit:
        raise TooMuch(f"{len(data)} bytes; at most {limit} are taken")
    return data


def decode_base64(text: str, *, start: int = 0, limit: int) -> bytes:
    """Decode base64 in the standard alphabet, padded, without blanks and line ends. Raises Malformed, TooMuch."""
    size = len(text) - start
    if size // 4 * 3 > limit + 2:
        raise TooMuch(f"about {size // 4 * 3} bytes; at most {limit} are taken")
    parts = []
    try:
        for at in range(start, len(text), _SLICE):
            piece = text[at : at + _SLICE]
            if at + _SLICE < len(text) and piece.endswith("="):
                raise Malformed("not base64: padding in the middle")
            parts.append(binascii.a2b_base64(piece, strict_mode=True))
    except ValueError as error:
        if isinstance(error, Malformed):
            raise
        raise Malformed(f"not base64: {str(error)[:100]}") from None
    data = b"".join(parts)
    if not data:
        raise Malformed("it is empty")
    if len(data) > limit:
        raise TooMuch(f"{len(data)} bytes; at most {limit} are taken")
    return data
