"""Asks nats-server to tell the path of one message, and reads what it tells: one event per server that the message passed.

A published message with the header `Nats-Trace-Dest` makes each server tell on that subject which connection and account the
message came from, which stream stored it and to which servers it went on.  A server refuses a message whose sender may not
publish to that subject (`headrace.jetstream.core.publish` then sends it without the header).  Deliveries from a stream to a
consumer are not told: the server disables the header of what it stores.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.jetstream.core import wire

_Text = Annotated[str, Meta(max_length=1024)]


class _Server(msgspec.Struct):
    name: _Text = ""
    cluster: _Text = ""


class _Event(msgspec.Struct):
    type: _Text
    ts: datetime
    kind: int = -1
    name: _Text = ""
    acc: _Text = ""
    subj: _Text = ""
    stream: _Text = ""
    error: _Text = ""


class _Request(msgspec.Struct):
    header: dict[_Text, Annotated[list[str], Meta(max_length=64)]] = {}


class _Told(msgspec.Struct):
    server: _Server
    events: Annotated[list[_Event], Meta(max_length=256)]
    request: _Request = msgspec.field(default_factory=_Request)


_decoder = msgspec.json.Decoder(_Told)


class Hop(msgspec.Struct, frozen=True):
    """A server on the path of a message. Times are Unix seconds of that server's clock.

    `place` is empty at the server that the sender is connected to; `1.2` is the second server that the first one behind it sent
    it on to. `stream`: the stream that stored it here, if one did. `onward`: to how many connections it went on.
    """

    message: str  # its id for deduplication
    place: str
    server: str
    came_s: float
    went_s: float
    subject: str = ""
    account: str = ""
    sender: str = ""  # the name of the connection that it came by
    stream: str = ""
    onward: int = 0
    error: str = ""


def ask_for_trace(subject: str) -> dict[str, str]:
    """Return the headers of a message whose path is to be told on this subject."""
    return {wire.TRACE_DESTINATION: subject}


def read_hop(data: bytes) -> Hop | None:
    """Return what a server tells of a message; None for what is no such event."""
    try:
        told = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    came = next((event for event in told.events if event.type == "in"), None)
    if came is None:
        return None
    header = told.request.header
    times = [event.ts.timestamp() for event in told.events]
    return Hop(
        message=_first(header, wire.MSG_ID),
        place=_first(header, wire.TRACE_HOP),
        server=told.server.name,
        came_s=came.ts.timestamp(),
        went_s=max(times),
        subject=came.subj,
        account=came.acc,
        sender=came.name,
        stream=next((event.stream for event in told.events if event.type == "js"), ""),
        onward=sum(event.type == "eg" for event in told.events),
        error=next((event.error for event in told.events if event.error), ""),
    )


def _first(header: dict[str, list[str]], name: str) -> str:
    values = header.get(name)
    return values[0] if values else ""
