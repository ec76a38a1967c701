"""Dead letters of requests that crashed too many workers."""

from __future__ import annotations

from headrace.broker.codec import decode
from headrace.broker.ingress.poison_letters import PoisonLetters
from headrace.broker.messages import DeadLetter, HistoryEntry
from headrace.jetstream.errors import NotConnected
from tests.support.ingress_parts import SUBJECTS, Parts


def letters(parts: Parts) -> PoisonLetters:
    return PoisonLetters(
        parts.messages,  # type: ignore[arg-type]
        SUBJECTS,
        parts.open,
        parts.tasks,
        retry_s=0.0,
        wall=lambda: 5.0,
    )


async def test_a_letter_is_tried_again_until_it_is_stored_and_has_the_history_in_order() -> None:
    parts = Parts()
    parts.record.history = {HistoryEntry(2, "w1"), HistoryEntry(10, "w0"), HistoryEntry(2, "w0")}
    parts.messages.failing = [NotConnected("away"), NotConnected("away")]
    async with parts.tasks:
        letters(parts).store(parts.record, 3)
    ((subject, data),) = parts.messages.published
    letter = decode(DeadLetter, data)
    assert subject == SUBJECTS.dlq("p")
    assert (letter.envelope.id, letter.reason, letter.at) == ("r", "poison", 5.0)
    assert [(entry.attempt, entry.worker) for entry in letter.history] == [(2, "w0"), (2, "w1"), (10, "w0")]


async def test_nothing_is_stored_of_a_request_that_has_ended_or_by_an_ingress_that_does_not_run() -> None:
    parts = Parts()
    letters(parts).store(parts.record, 3)
    parts.open.remove("r")
    async with parts.tasks:
        letters(parts).store(parts.record, 3)
    assert parts.messages.published == []
