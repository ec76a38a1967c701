"""How an ingress ends its requests, and what their readers, their timelines and the dead letters then say."""

from __future__ import annotations

import pytest

from headrace.broker.codec import decode
from headrace.broker.errors import DeadlineExceeded, JobWithdrawn
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.durable import DeadLetter
from headrace.broker.messages.events import JobEvent
from headrace.broker.messages.frames import Frame, Row
from headrace.broker.protocol.quarantine import Crash
from headrace.jetstream.errors import NotConnected
from tests.support.ingress_parts import ALLOWED_S, SUBJECTS, Parts


async def missed(parts: Parts) -> None:
    parts.owner.end_overdue(ALLOWED_S)
    while True:
        await parts.stream.rows()


async def test_a_request_that_no_worker_began_waited_in_the_queue() -> None:
    with pytest.raises(DeadlineExceeded, match=r"waited 1000000000\.0 s in the queue and never started"):
        await missed(Parts())


async def test_a_request_that_was_answered_says_how_many_tokens_came() -> None:
    parts = Parts()
    parts.judge.on_frame(Frame(worker="w", rows=[Row("r", 1, 5, 0, 0, [1, 2, 3], ["a", "b", "c"])]), 0.0)
    with pytest.raises(DeadlineExceeded, match=r"the request had started and produced 3 tokens"):
        await missed(parts)


async def test_a_request_in_its_prefill_has_started() -> None:
    parts = Parts()
    parts.judge.on_event(JobEvent(kind="started", id="r", attempt=1, worker="w"))
    with pytest.raises(DeadlineExceeded, match="had started and produced 0 tokens"):
        await missed(parts)


async def test_a_request_that_is_withdrawn_leaves_nothing_open_and_is_withdrawn_once() -> None:
    parts = Parts()
    assert parts.owner.withdraw("r", "another tenant") == 0
    assert (parts.owner.withdraw("r", "_"), parts.owner.withdraw("r", "_")) == (1, 0)
    with pytest.raises(JobWithdrawn):
        await parts.stream.rows()
    assert (len(parts.open), len(parts.judge), parts.spills.forgotten) == (0, 0, ["r"])


CRASHES = (Crash(2, "w0", 20), Crash(3, "w1", 5), Crash(10, "w2", 1))


async def test_a_letter_is_tried_again_until_it_is_stored_and_has_the_crashes_that_count_with_their_groups() -> None:
    parts = Parts()
    parts.record.history = {HistoryEntry(1, "forgiven", 9), HistoryEntry(3, "w1", 12)}
    parts.messages.failing = [NotConnected("away"), NotConnected("away")]
    async with parts.tasks:
        parts.outbox.poisoned(parts.record, CRASHES)
    ((subject, data),) = parts.messages.published
    letter = decode(DeadLetter, data)
    assert subject == SUBJECTS.dlq("p")
    assert (letter.envelope.id, letter.reason, letter.at) == ("r", "poison", 5.0)
    assert letter.history == [HistoryEntry(2, "w0", 20), HistoryEntry(3, "w1", 5), HistoryEntry(10, "w2", 1)]
    assert parts.spills.kept == ["r"], "its payload is needed to run it again"


async def test_nothing_is_stored_of_a_request_that_has_ended_or_by_an_ingress_that_does_not_run() -> None:
    parts = Parts()
    parts.outbox.poisoned(parts.record, CRASHES)
    parts.judge.close("r", None)
    async with parts.tasks:
        parts.outbox.poisoned(parts.record, CRASHES)
    assert parts.messages.published == []
