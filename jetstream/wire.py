"""The parts of the NATS protocol that Headrace handles itself: publish commands, headers, ack subjects. Pure.

The token path and the publish path build their commands here, because the general client costs several times as much per
message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from headrace.jetstream.errors import SubjectError

STATUS = "Status"
DESCRIPTION = "Description"
MSG_ID = "Nats-Msg-Id"
TTL = "Nats-TTL"
EXPECT_LAST_SUBJECT_SEQ = "Nats-Expected-Last-Subject-Sequence"
MARKER_REASON = "Nats-Marker-Reason"
KV_OPERATION = "KV-Operation"
ROLLUP = "Nats-Rollup"
SUBJECT = "Nats-Subject"
SEQUENCE = "Nats-Sequence"
NUM_PENDING = "Nats-Num-Pending"
TIME_STAMP = "Nats-Time-Stamp"
PENDING_MESSAGES = "Nats-Pending-Messages"

# Headers that the server adds to a stored message on delivery.
READ_HEADERS = frozenset(
    {
        "Nats-Stream",
        SUBJECT,
        SEQUENCE,
        TIME_STAMP,
        NUM_PENDING,
        "Nats-Last-Sequence",
        "Nats-UpTo-Sequence",
        STATUS,
        DESCRIPTION,
    }
)

ACK = b"+ACK"
NAK = b"-NAK"
PROGRESS = b"+WPI"
TERM = b"+TERM"

_LINE = b"NATS/1.0"
_BLANKS = " \t\n\r\v\f"


def pub(subject: str, data: bytes, reply: str = "") -> bytes:
    """Return a PUB command. `subject` and `reply` must be valid: they are not checked for spaces or line breaks."""
    if reply:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(data), data)
    return b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(data), data)


def hpub(subject: str, data: bytes, header: bytes, reply: str = "") -> bytes:
    """Return an HPUB command; `header` comes from `encode_headers`."""
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (
        subject.encode(),
        reply.encode(),
        len(header),
        len(header) + len(data),
        header,
        data,
    )


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Return the header block of an HPUB. Raises SubjectError for names or values that would break out of it."""
    lines = ["NATS/1.0"]
    for name, value in headers.items():
        if name not in _sendable:
            _check_name(name, value)
        lines.append(f"{name}: {value}")
    lines.append("\r\n")
    block = "\r\n".join(lines)
    # Each line but the last ends in one break, which ends in two: any more came out of a value.
    if block.count("\n") != len(lines) or block.count("\r") != len(lines):
        name, value = next((n, v) for n, v in headers.items() if "\r" in v or "\n" in v)
        raise _unsendable(name, value)
    return block.encode()


_MOST_NAMES = 256
_sendable: set[str] = set()  # names of headers that were checked


def _check_name(name: str, value: str) -> None:
    if not name or ":" in name or " " in name or "\r" in name or "\n" in name:
        raise _unsendable(name, value)
    if len(_sendable) < _MOST_NAMES:
        _sendable.add(name)


def _unsendable(name: str, value: str) -> SubjectError:
    return SubjectError(
        f"header {name!r}: {value!r} cannot be sent: line breaks, and spaces or colons in names, are not allowed"
    )


def publish_headers(headers: Mapping[str, str] | None, msg_id: str | None, last_subject_seq: int | None) -> dict[str, str]:
    """Return the headers of a publish: the given ones, the deduplication id, and the expected last sequence."""
    found = dict(headers) if headers else {}
    if msg_id is not None:
        found[MSG_ID] = msg_id
    if last_subject_seq is not None:
        found[EXPECT_LAST_SUBJECT_SEQ] = str(last_subject_seq)
    return found


def status_of(raw: bytes | None) -> int:
    """Return the inline status of a received header block, 0 if there is none."""
    if raw and raw[8:9] == b" ":
        code = raw[9:12]
        if code.isdigit():
            return int(code)
    return 0


def decode_headers(raw: bytes | None) -> dict[str, str]:
    """Parse a received header block; an inline status becomes `Status` and `Description`."""
    if not raw:
        return {}
    first, *lines = raw.decode("utf-8", "replace").split("\r\n")
    out: dict[str, str] = {}
    inline = first[len(_LINE) :].strip(_BLANKS)
    if inline:
        code, _, description = inline.partition(" ")
        out[STATUS] = code
        if description:
            out[DESCRIPTION] = description
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            out[name.strip(_BLANKS)] = value.strip(_BLANKS)
    return out


class AckSubject(NamedTuple):
    stream: str
    consumer: str
    num_delivered: int
    stream_seq: int
    consumer_seq: int
    pending: int
    stored: float  # Unix time at which the message was stored


def parse_ack_subject(reply: str) -> AckSubject:
    """Read `$JS.ACK.<stream>.<consumer>.<delivered>.<sseq>.<cseq>.<time>.<pending>`, or the longer form with a domain."""
    parts = reply.split(".")
    if len(parts) < 9 or parts[0] != "$JS" or parts[1] != "ACK":
        raise SubjectError(f"{reply!r} is no ack subject")
    if len(parts) > 9:
        del parts[2:4]  # domain and account hash
    return AckSubject(parts[2], parts[3], int(parts[4]), int(parts[5]), int(parts[6]), int(parts[8]), int(parts[7]) / 1e9)


def nak_body(delay_s: float) -> bytes:
    """Return the body of a negative ack: the message is redelivered after the delay, or at once."""
    if delay_s <= 0:
        return NAK
    return NAK + b" " + json.dumps({"delay": nanoseconds(delay_s)}).encode()


def ttl_value(ttl_s: float) -> str:
    """Convert seconds to the server's TTL: whole seconds, at least one, rounded up."""
    if not ttl_s > 0 or not math.isfinite(ttl_s):
        raise ValueError(f"a TTL must be a positive number of seconds, got {ttl_s!r}")
    return str(max(1, math.ceil(ttl_s)))


def unix_time(time_stamp: str) -> float:
    """Convert the server's time of a message (RFC 3339) to Unix time; 0 for none."""
    return datetime.fromisoformat(time_stamp).timestamp() if time_stamp else 0.0


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
