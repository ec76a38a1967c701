"""The shape of a JSON body, before anything is built from it: how deep it is and how much of everything is in it.

A decoder turns a body of some megabytes into millions of objects in one go, and nothing else runs meanwhile; a deep one uses up
the stack of whoever handles it later, also in other processes.  So what stands outside of texts is counted first:
at once for short bodies, in a thread for long ones, some kilobytes at a time, so that other threads get their turn.

What is allowed is what a decoder makes in some 30 ms, counted in numbers: a text is one more, two escaped characters are one,
and so are eight bytes of what is not ASCII.  Lists and objects have a limit of their own; of both at once, half of each.
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
    """Raises MalformedBody."""
    size = len(body)
    if size <= INLINE_BYTES:
        if body.count(b"[") + body.count(b"{") > settings.max_json_depth:  # only then it can be too deep
            check_shape_now(body, settings)
    else:
        await asyncio.to_thread(check_shape_now, body, settings)


def check_shape_now(body: bytes, settings: FrontendSettings) -> None:
    """Takes about 5 ns per byte. Raises MalformedBody."""
    depth = containers = values = 0
    at = 0
    in_text = False
    while at < len(body):
        end = min(at + _WINDOW, len(body))
        while end < len(body) and body[end - 1] == 0x5C:  # a backslash and what it escapes stay together
            end += 1
        # With one quote more than it has, a window that ends inside of a text has it closed, and another one ends with a quote.
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
            told = f"{containers} lists, objects and members of objects, and {values} values"
            raise MalformedBody(f"the body has too much of everything: {told}")
        for bracket in brackets:
            depth += 1 if bracket in b"[{" else -1
            if depth > settings.max_json_depth:
                raise MalformedBody(f"the body is nested more than {settings.max_json_depth} levels deep")
