"""Encodes and decodes wire messages, their headers, and integers packed into bytes.

msgspec writes and reads plain msgpack several times faster than the pure reference package; any program that speaks msgpack
can take part (`tests/unit/broker/test_codec.py` decodes every message with the reference package).
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.broker.errors import MalformedMessage, UnsupportedVersion
from headrace.broker.messages.control import History, HistoryEntry, IngressControl
from headrace.broker.messages.operator import WorkerCommand
from headrace.broker.messages.prefill import AnyWorkerControl
from headrace.broker.messages.requests import (
    HEADER_ATTEMPT,
    HEADER_HISTORY,
    HEADER_PREFILL,
    MOST_ATTEMPTS,
    WIRE_VERSION,
    Envelope,
    PrefillDecision,
)

T = TypeVar("T")

NOT_DECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
"""What a decoder raises for bytes that are no such message. A RecursionError is one for nested values."""

_MOST_DIGITS = 10  # of an attempt in a header

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class _VersionOnly(msgspec.Struct):
    v: int = WIRE_VERSION


_version_decoder = msgspec.msgpack.Decoder(_VersionOnly)


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def decode(kind: type[T], data: bytes | memoryview) -> T:
    """Return the message of type `kind` in `data`.

    Raises MalformedMessage, which names the wrong field, or UnsupportedVersion.
    """
    try:
        message: T = _decoder(kind).decode(data)  # type: ignore[arg-type]  # types and unions are hashable
    except NOT_DECODED as error:
        _refuse_newer(data)
        raise MalformedMessage(f"not a {_name(kind)}: {error}") from None
    try:
        version: int = message.v  # type: ignore[attr-defined]
    except AttributeError:  # parts of messages have none
        return message
    if version > WIRE_VERSION:
        raise UnsupportedVersion(f"a {_name(kind)} of version {version}; this program reads up to {WIRE_VERSION}")
    return message


def decode_request(data: bytes | memoryview) -> Envelope:
    """Return the request in `data`, of which a judge must be named. Raises as `decode` does."""
    envelope = decode(Envelope, data)
    if not envelope.judge:  # only a stored job, which gets one by its carrier, may leave it out
        raise MalformedMessage("not an Envelope: `judge` is empty")
    return envelope


def decode_ingress_control(data: bytes) -> IngressControl:
    """Return the message in `data` from an ingress's control subject. Raises as `decode` does."""
    control: IngressControl = decode(IngressControl, data)  # type: ignore[arg-type]  # mypy has no type for unions as values
    return control


def decode_worker_control(data: bytes) -> AnyWorkerControl:
    """Return the message in `data` from a worker's control subject. Raises as `decode` does."""
    control: AnyWorkerControl = decode(AnyWorkerControl, data)  # type: ignore[arg-type]
    return control


def decode_worker_command(data: bytes) -> WorkerCommand:
    """Return the operator's command in `data`, from a worker's subject for these. Raises as `decode` does."""
    command: WorkerCommand = decode(WorkerCommand, data)  # type: ignore[arg-type]
    return command


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _refuse_newer(data: bytes | memoryview) -> None:
    try:
        version = _version_decoder.decode(data).v
    except NOT_DECODED:
        return
    if version > WIRE_VERSION:
        raise UnsupportedVersion(f"a message of version {version}; this program reads up to {WIRE_VERSION}")


# Integers packed into bytes:

_U32 = next(code for code in "IL" if array(code).itemsize == 4)


def pack_u32(values: Sequence[int]) -> bytes:
    """Convert token ids to little-endian u32. Raises MalformedMessage for a value outside u32."""
    try:
        packed = array(_U32, values)
    except (OverflowError, TypeError) as error:
        raise MalformedMessage(f"a token id is not a u32: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(data: bytes) -> list[int]:
    """Convert little-endian u32 to token ids. Raises MalformedMessage when the length is no multiple of 4."""
    return _unpack(_U32, data, 4).tolist()


def pack_u64(values: Sequence[int]) -> bytes:
    packed = array("Q", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_u64(data: bytes) -> list[int]:
    """Convert little-endian u64 to block chain values. Raises MalformedMessage when the length is no multiple of 8."""
    return _unpack("Q", data, 8).tolist()


def unpack_u64_array(data: bytes | bytearray | memoryview) -> array[int]:
    """Convert little-endian u64 to block chain values in an array, which the prefix index takes without a copy.

    Raises MalformedMessage when the length is no multiple of 8.
    """
    return _unpack("Q", data, 8)


def unpack_f32(data: bytes) -> list[float]:
    """Convert little-endian f32 to the numbers of a vector. Raises MalformedMessage when the length is no multiple of 4."""
    return _unpack("f", data, 4).tolist()


def _unpack(code: str, data: bytes | bytearray | memoryview, size: int) -> array[Any]:
    if len(data) % size:
        raise MalformedMessage(f"{len(data)} bytes are no whole number of {size * 8}-bit numbers")
    values = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


# Headers:


def job_headers(attempt: int, history: Sequence[HistoryEntry]) -> dict[str, str]:
    """Return the headers of a stored job; none for a first attempt, so that the common case costs no header parse."""
    headers: dict[str, str] = {}
    if attempt != 1:
        headers[HEADER_ATTEMPT] = str(attempt)
    if history:
        headers[HEADER_HISTORY] = json.dumps([_entry(h) for h in history], separators=(",", ":"))
    return headers


def _entry(entry: HistoryEntry) -> list[int | str]:
    return [entry.attempt, entry.worker, entry.group] if entry.group else [entry.attempt, entry.worker]


def prefill_header(decision: PrefillDecision) -> dict[str, str]:
    return {HEADER_PREFILL: msgspec.json.encode(decision).decode()}


def parse_prefill_header(headers: Mapping[str, str] | None) -> PrefillDecision | None:
    """Return the prefill decision of a job, or None if there is none. Raises MalformedMessage naming the header."""
    raw = headers.get(HEADER_PREFILL) if headers else None
    if not raw:
        return None
    try:
        return msgspec.json.decode(raw, type=PrefillDecision)
    except NOT_DECODED as error:
        raise MalformedMessage(f"header {HEADER_PREFILL}={_short(raw)}: {error}") from None


def parse_job_headers(headers: Mapping[str, str] | None) -> tuple[int, list[HistoryEntry]]:
    """Return (attempt, history) of a job. Raises MalformedMessage naming the header."""
    if not headers:
        return 1, []
    try:
        written = headers.get(HEADER_ATTEMPT, "1")
        attempt = int(written) if len(written) <= _MOST_DIGITS else 0
        if not 1 <= attempt <= MOST_ATTEMPTS:
            raise ValueError(f"not 1 to {MOST_ATTEMPTS}")
    except ValueError as error:
        raise MalformedMessage(f"header {HEADER_ATTEMPT}={_short(headers[HEADER_ATTEMPT])}: {error}") from None
    raw = headers.get(HEADER_HISTORY)
    if not raw:
        return attempt, []
    try:
        return attempt, msgspec.json.decode(raw, type=History)
    except NOT_DECODED as error:
        raise MalformedMessage(f"header {HEADER_HISTORY}={_short(raw)}: {error}") from None


def _short(value: str) -> str:
    """Return a header's value for a message: it may be as long as a message."""
    return repr(value if len(value) <= 80 else f"{value[:80]}…")


class LoggedRequest(Protocol):
    """A request in any form (`Job`, `Envelope`, `OpenJob`, …). `name` is its client's own id of it, or empty."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...


def log_ids(job: LoggedRequest) -> dict[str, str]:
    return {"request_id": job.id, "client_request_id": job.name} if job.name else {"request_id": job.id}
