"""Edits the body of a stored job: its answer is whole or a durable stream, whatever the body says of streaming."""

from __future__ import annotations

import msgspec

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TRUE = msgspec.Raw(b"true")

_NOT_WHOLE = ("stream", "stream_options", "background")


def whole_body(body: bytes) -> bytes:
    """Return a body that asks for a whole answer. One that is no JSON object stays as it is: its API says what is wrong."""
    fields = _fields(body)
    if fields is None or not any(name in fields for name in _NOT_WHOLE):
        return body
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in _NOT_WHOLE})


def stream_body(body: bytes) -> bytes:
    """Return a body that asks for a stream. One that is no JSON object stays as it is."""
    fields = _fields(body)
    if fields is None or fields.get("stream") == _TRUE:
        return body
    return msgspec.json.encode({**fields, "stream": _TRUE})


def asks(body: bytes, name: str) -> bool:
    """Return whether a field of a body is true."""
    fields = _fields(body)
    return fields is not None and fields.get(name) == _TRUE


def _fields(body: bytes) -> dict[str, msgspec.Raw] | None:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        return None
