"""Reads the body of a request piece by piece, for routes whose bodies are not held in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request

from headrace.frontend.errors import BodyTimeout, BodyTooLarge
from headrace.frontend.http.http_exchange import ClientGone


def announced_bytes(request: Request) -> int | None:
    """Return the size of the body, None if the client does not announce it."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() else None


async def body_pieces(request: Request, *, limit: int, stall_s: float) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; while the reader does not ask for more, the client is held up.

    Raises BodyTooLarge (at once if the size is announced), BodyTimeout when nothing arrives for `stall_s`, ClientGone.
    """
    announced = announced_bytes(request)
    if announced is not None and announced > limit:
        raise BodyTooLarge(f"the body has {announced} bytes; this route takes at most {limit}")
    size = 0
    while True:
        try:
            async with asyncio.timeout(stall_s):
                message = await request.receive()
        except TimeoutError:
            raise BodyTimeout(f"no more of the body arrived within {stall_s:g} s, after {size} bytes") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise BodyTooLarge(f"the body is larger than the {limit} bytes this route takes")
        if piece:
            yield piece
        if not message.get("more_body", False):
            return
