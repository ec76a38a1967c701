"""Dead letters as people and programs read them."""

from __future__ import annotations

import json

import pytest

from headrace.broker.codec import encode
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.durable import DeadLetter, Unreadable
from headrace.broker.messages.requests import Envelope
from headrace.commands.dlq import details, read_letter, summary, told
from headrace.jetstream.ports import StoredMessage
from headrace.jetstream.subjects import Subjects

NAMES = Subjects()
ADVISORY = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.HR_WORK.W_w"
LETTER = DeadLetter(
    envelope=Envelope(
        id="r1",
        pool="p",
        model="m",
        judge="i-1",
        deadline=900.0,
        created=300.0,
        tokens=7,
        max_tokens=9,
        payload=b"secret words",
    ),
    reason="poison",
    attempt=3,
    history=[HistoryEntry(1, "a-1"), HistoryEntry(2, "b-1", 5), HistoryEntry(3, "c-1", 1)],
    at=310.0,
)


def advisory(**fields: object) -> bytes:
    said = {
        "type": "io.nats.jetstream.advisory.v1.max_deliver",
        "stream": "HR_WORK",
        "consumer": "W_w",
        "stream_seq": 5,
        "deliveries": 3,
        "timestamp": "2026-01-02T03:04:05.123456789Z",
    }
    return json.dumps(said | fields).encode()


def test_a_request_is_shown_with_why_and_on_whom_it_crashed() -> None:
    letter = read_letter(StoredMessage(NAMES.dlq("p"), 17, encode(LETTER)), NAMES)
    text = told(letter)
    assert text.startswith("17: request r1, poison\n")
    assert "given up 1970-01-01T00:05:10Z in attempt 3" in text
    assert [line.split() for line in text.splitlines() if line.startswith("    attempt")] == [
        ["attempt", "1", "a-1", "unknown"],
        ["attempt", "2", "b-1", "5"],
        ["attempt", "3", "c-1", "1"],
    ]
    assert summary(letter)["history"][2] == {"attempt": 3, "worker": "c-1", "group": 1}


def test_nothing_that_is_shown_contains_the_prompt() -> None:
    letter = read_letter(StoredMessage(NAMES.dlq("p"), 17, encode(LETTER)), NAMES)
    shown = details(letter)
    assert shown["envelope"]["payload_bytes"] == len(LETTER.envelope.payload)
    assert "secret" not in json.dumps(shown) + told(letter)


@pytest.mark.parametrize(
    ("fields", "reason", "words"),
    [
        ({}, "max_deliver", "the server gave up delivering it"),
        ({"type": "io.nats.jetstream.advisory.v1.other", "reason": "because"}, "other", "other: because"),
    ],
)
def test_an_advisory_of_the_server_is_shown_as_such(fields: dict[str, object], reason: str, words: str) -> None:
    letter = read_letter(StoredMessage(ADVISORY, 3, advisory(**fields)), NAMES)
    assert (letter.reason, letter.id) == (reason, "")
    assert told(letter).startswith("3: advisory of the server, 2026-01-02T03:04:05Z\n  message 5 of HR_WORK, consumer W_w")
    assert words in told(letter)
    assert summary(letter)["stream_seq"] == 5


def test_a_message_that_nobody_could_read_is_shown_with_why_and_when() -> None:
    buried = encode(Unreadable(subject="hr.work.p.w", why="not an Envelope: no id", data=b"secret", at=310.0))
    letter = read_letter(StoredMessage(NAMES.dlq("p"), 4, buried), NAMES)
    assert (letter.reason, letter.at, letter.id) == ("unreadable", 310.0, "")
    assert told(letter) == "4: cannot be read (not an Envelope: no id; 6 bytes of hr.work.p.w), on hr.dlq.p\n"
    assert "secret" not in json.dumps(details(letter))


@pytest.mark.parametrize(
    ("subject", "data"),
    [
        (NAMES.dlq("p"), b"\xc1"),
        (NAMES.dlq("p"), encode(LETTER).replace(b"\x01v", b"")[:-1]),
        (ADVISORY, b"{"),
        (ADVISORY, advisory(timestamp="yesterday")),
    ],
)
def test_what_cannot_be_read_is_shown_all_the_same(subject: str, data: bytes) -> None:
    letter = read_letter(StoredMessage(subject, 4, data), NAMES)
    assert (letter.reason, letter.at) == ("unreadable", 0.0)
    assert told(letter).startswith("4: cannot be read (")
    assert summary(letter)["trouble"]
