"""Represents one delivery of a stored message and sends its ack, nak, progress or term."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.jetstream.core import wire
from headrace.jetstream.core.raw_client import CoreClient


class StreamDelivery:
    """A delivery; implements `ports.Delivery`. Headers and the ack subject are parsed only when they are read."""

    __slots__ = ("_ack", "_core", "_headers", "_raw_headers", "_reply", "_subject", "data")

    def __init__(self, core: CoreClient, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._core = core
        self._subject = subject
        self._reply = reply
        self.data = data
        self._raw_headers = headers
        self._headers: Mapping[str, str] | None = None
        self._ack: wire.AckSubject | None = None

    def __repr__(self) -> str:
        return f"StreamDelivery(subject={self.subject!r}, stream_seq={self.stream_seq}, num_delivered={self.num_delivered})"

    @property
    def subject(self) -> str:
        return self._subject.decode(errors="replace")

    @property
    def headers(self) -> Mapping[str, str]:
        if self._headers is None:
            self._headers = wire.decode_headers(self._raw_headers)
        return self._headers

    @property
    def _position(self) -> wire.AckSubject:
        if self._ack is None:
            self._ack = wire.parse_ack_subject(self._reply.decode())
        return self._ack

    @property
    def stream_seq(self) -> int:
        return self._position.stream_seq

    @property
    def num_delivered(self) -> int:
        return self._position.num_delivered

    @property
    def pending(self) -> int:
        return self._position.pending

    @property
    def stored(self) -> float:
        return self._position.stored

    def ack(self) -> None:
        self._say(wire.ACK)

    def nak(self, delay_s: float = 0.0) -> None:
        self._say(wire.nak_body(delay_s))

    def progress(self) -> None:
        self._say(wire.PROGRESS)

    def term(self, reason: str = "") -> None:
        self._say(b"%b %b" % (wire.TERM, reason.replace("\r", " ").replace("\n", " ").encode()) if reason else wire.TERM)

    def _say(self, what: bytes) -> None:
        self._core.send_now(b"PUB %b %d\r\n%b\r\n" % (self._reply, len(what), what))
