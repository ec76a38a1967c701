"""Limits the depth and the number of values of a JSON body before it is decoded.

A decoder turns a body of some megabytes into millions of objects in one call, and nothing else runs meanwhile. A deeply nested
body exhausts the stack of code that handles it later, also in other processes. So the values outside of strings are counted
first: at once for short bodies, in a thread for long ones, some kilobytes at a time, so that other threads can run.

The limit corresponds to some 30 ms of decoding, counted in numbers: a string counts as one value, two escaped characters as
one, and eight bytes of non-ASCII characters as one. Lists and objects have a limit of their own; a body may have half of each
limit.
"""

from __future__ import annotations

import asyncio
import re

from headrace.frontend.errors import MalformedBody
from headrace.frontend.settings import FrontendSettings

INLINE_BYTES = 128 * 1024
_WINDOW = 64 * 1024
_ESCAPES = 2  # escaped characters that take as long to decode as a number
_FOREIGN = 8  # bytes of characters outside of ASCII that do
_ASCII = bytes(range(128))
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


async def check_shape(body: bytes, settings: FrontendSettings) -> None:
    """Check a body, in a thread if it is long. Raises MalformedBody."""
    size = len(body)
    if size <= INLINE_BYTES:
        if body.count(b"[") + body.count(b"{") > settings.max_json_depth:  # fewer brackets cannot nest too deeply
            check_shape_now(body, settings)
    else:
        await asyncio.to_thread(check_shape_now, body, settings)


def check_shape_now(body: bytes, settings: FrontendSettings) -> None:
    """Check a body in about 5 ns per byte. Raises MalformedBody."""
    depth = containers = values = 0
    at = 0
    in_text = False
    while at < len(body):
        end = min(at + _WINDOW, len(body))
        while end < len(body) and body[end - 1] == 0x5C:  # a backslash and the character it escapes stay together
            end += 1
        # One more quote closes a string that continues after the window. Otherwise the window then ends with a lone quote.
        window = (b'"' if in_text else b"") + body[at:end] + b'"'
        plain, texts = _TEXT.subn(b"", window)
        in_text = not plain.endswith(b'"')
        at = end
        containers += plain.count(b":")
        values += plain.count(b",") + texts + window.count(b"\\") // _ESCAPES
        if not window.isascii():
            values += len(window.translate(None, _ASCII)) // _FOREIGN
        brackets = plain.translate(None, _NOT_BRACKETS)
        containers += len(brackets) // 2
        if containers > settings.max_json_containers:
            raise MalformedBody(f"the body has more than {settings.max_json_containers} lists, objects and members of objects")
        if values > settings.max_json_values:
            raise MalformedBody(f"the body has more than {settings.max_json_values} values")
        if containers / settings.max_json_containers + values / settings.max_json_values > 1:
            counts = f"{containers} lists, objects and members of objects, and {values} values"
            raise MalformedBody(f"the body has too much of everything: {counts}")
        for bracket in brackets:
            depth += 1 if bracket in b"[{" else -1
            if depth > settings.max_json_depth:
                raise MalformedBody(f"the body is nested more than {settings.max_json_depth} levels deep")
