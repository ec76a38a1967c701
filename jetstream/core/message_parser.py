"""The parser of a connection to NATS: messages without a regular expression and a coroutine each.

The plain client matches one or two patterns per message, moves the rest of its buffer twice and starts a coroutine. Here a
message is two searches and two slices. All other lines of the protocol, which are rare, go to the plain parser.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.jetstream.core.natspy import Parser, errors

# sid, subject, reply, payload, raw header block
OnMessage = Callable[[int, bytes, bytes, bytes, bytes | None], None]

_END = b"\r\n"
_INITIALS = b"MH"  # of MSG and HMSG


class MessageParser(Parser):  # type: ignore[misc]  # nats-py has no type marker
    """Parses what a server sends, in reads of any size."""

    def __init__(self, client: Any, on_message: OnMessage) -> None:
        """`on_message` must not raise. `client` gets all other lines, as nats-py has it."""
        self._on_message = on_message
        self._parts: list[bytes] = []  # of a line or message that is not whole yet
        self._size = 0  # bytes in them
        self._needed = 0  # at least so many are needed to go on
        super().__init__(client)

    def reset(self) -> None:
        """Forget what is not whole: the connection it came by has ended."""
        super().reset()
        self._parts = []
        self._size = self._needed = 0

    async def parse(self, data: bytes = b"") -> None:
        """Take the bytes of one read. Raises ProtocolError."""
        if self._parts:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._needed:
                return
            data = b"".join(self._parts)
        parts = self._parts = []  # of this connection: `reset` replaces the list
        on_message, length = self._on_message, len(data)
        at = needed = 0
        while (line_end := data.find(_END, at)) >= 0:
            begin = line_end + 2
            if data[at] not in _INITIALS:
                await super().parse(data[at:begin])
                if parts is not self._parts:
                    return
                if self.buf:
                    raise errors.ProtocolError(f"nats: unknown line {bytes(self.buf[:100])!r}")
                at = begin
                continue
            sid, subject, reply, headers, size = _first_line(data[at:line_end])
            end = begin + size
            if length < end + 2:
                needed = end + 2 - at
                break
            if headers:
                body = begin + headers
                on_message(sid, subject, reply, data[body:end], data[begin:body])
            else:
                on_message(sid, subject, reply, data[begin:end], None)
            at = end + 2
        if at < length:
            parts.append(data[at:])
            self._size, self._needed = length - at, needed


def _first_line(line: bytes) -> tuple[int, bytes, bytes, int, int]:
    """Return sid, subject, reply, bytes of the headers and of all. Raises ProtocolError."""
    words = line.split()
    try:
        if words[0] == b"MSG":
            _, subject, sid, *reply, size = words
            headers, whole = 0, int(size)
        else:
            kind, subject, sid, *reply, head, size = words
            headers, whole = int(head), int(size)
            if kind != b"HMSG":
                raise ValueError
        if not 0 <= headers <= whole or len(reply) > 1:
            raise ValueError
        return int(sid), subject, reply[0] if reply else b"", headers, whole
    except (ValueError, IndexError):
        raise errors.ProtocolError(f"nats: malformed line {line[:100]!r}") from None
