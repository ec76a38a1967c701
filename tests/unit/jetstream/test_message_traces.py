"""What nats-server tells of the path of a message is read strictly, and anything else is nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.jetstream.message_traces import Hop, read_hop

CAME = {
    "type": "in",
    "ts": "2026-01-02T03:04:05.250000001Z",
    "kind": 0,
    "cid": 5,
    "name": "f",
    "acc": "A",
    "subj": "hr.req.p.std._",
}
STORED = {"type": "js", "ts": "2026-01-02T03:04:05.5Z", "stream": "HR_REQ", "subject": "hr.req.p.std._"}
AT = 1767323045.0


def told(*events: dict[str, Any], **header: list[str]) -> bytes:
    names = {"message": "Nats-Msg-Id", "place": "Nats-Trace-Hop"}
    return json.dumps(
        {
            "server": {"name": "n1", "id": "N", "ver": "2.15.1", "seq": 3},
            "request": {"header": {names[key]: value for key, value in header.items()}, "msgsize": 9},
            "hops": 1,
            "events": events,
        }
    ).encode()


def hop(*events: dict[str, Any], **header: list[str]) -> Hop:
    read = read_hop(told(*events, **header))
    assert read is not None
    return read


def test_a_stored_message_has_its_times_account_and_stream() -> None:
    assert read_hop(told(CAME, STORED, message=["r1.1"])) == Hop(
        message="r1.1",
        place="",
        server="n1",
        came_s=AT + 0.25,
        went_s=AT + 0.5,
        subject="hr.req.p.std._",
        account="A",
        sender="f",
        stream="HR_REQ",
    )


def test_a_message_that_goes_on_to_another_server_has_the_place_of_that_one_there() -> None:
    onward = {"type": "eg", "ts": "2026-01-02T03:04:05.3Z", "kind": 1, "cid": 9, "name": "n2", "hop": "1"}
    first, second = hop(CAME, onward, message=["r1.1"]), hop({**CAME, "kind": 1}, STORED, place=["1"])
    assert (first.onward, first.stream, first.place) == (1, "", "")
    assert (second.onward, second.stream, second.place) == (0, "HR_REQ", "1")


def test_an_error_of_one_event_is_told() -> None:
    assert hop(CAME, {**STORED, "error": "msgid is duplicate"}).error == "msgid is duplicate"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"server": {}}',
        told(STORED),
        told({**CAME, "ts": 7}),
        told({**CAME, "name": "x" * 2000}),
        b"[" * 9999,
    ],
    ids=["empty", "list", "not_text", "no_events", "no_ingress", "no_time", "long", "deep"],
)
def test_anything_else_is_nothing(data: bytes) -> None:
    assert read_hop(data) is None
