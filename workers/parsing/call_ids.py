"""Derives the ids of tool calls, which stay the same however often an answer is interrupted and resumed."""

from __future__ import annotations

import re
from base64 import b32encode
from hashlib import blake2b

_ENGINE_MADE = re.compile(r"(chatcmpl-tool-|call_(\d+_)?)[0-9a-f-]{16,}")
_NINE = re.compile(r"[A-Za-z0-9]{9}")


def call_id(request_id: str, choice: int, index: int, *, length: int = 24) -> str:
    """Return `length` lower case letters and digits, a hash of the arguments."""
    digest = blake2b(f"{request_id}\0{choice}\0{index}".encode(), digest_size=(5 * length + 7) // 8).digest()
    return b32encode(digest).decode().lower()[:length]


def stable_call_id(given: str | None, request_id: str, choice: int, index: int) -> str:
    """Return the id of a call for which its parser gave the id `given`.

    Meaningful ids (`functions.get_weather:0`) stay; random ones are replaced. Some templates require the nine characters that
    their parser generates.
    """
    if given and _NINE.fullmatch(given):
        return call_id(request_id, choice, index, length=9)
    if given and not _ENGINE_MADE.fullmatch(given):
        return given
    return f"call_{call_id(request_id, choice, index)}"
