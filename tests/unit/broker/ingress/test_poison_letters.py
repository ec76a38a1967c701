"""Dead letters of requests that crash their workers."""

from __future__ import annotations

from headrace.broker.codec import decode
from headrace.broker.ingress.poison_letters import PoisonLetters
from headrace.broker.messages import DeadLetter, HistoryEntry
from headrace.broker.protocol.crashes import Crash
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


CRASHES = (Crash(2, "w0", 20), Crash(3, "w1", 5), Crash(10, "w2", 1))


async def test_a_letter_is_tried_again_until_it_is_stored_and_has_the_crashes_that_count_with_their_groups() -> None:
    parts = Parts()
    parts.record.history = {HistoryEntry(1, "forgiven", 9), HistoryEntry(3, "w1", 12)}
    parts.messages.failing = [NotConnected("away"), NotConnected("away")]
    async with parts.tasks:
        letters(parts).store(parts.record, CRASHES)
    ((subject, data),) = parts.messages.published
    letter = decode(DeadLetter, data)
    assert subject == SUBJECTS.dlq("p")
    assert (letter.envelope.id, letter.reason, letter.at) == ("r", "poison", 5.0)
    assert letter.history == [HistoryEntry(2, "w0", 20), HistoryEntry(3, "w1", 5), HistoryEntry(10, "w2", 1)]


async def test_nothing_is_stored_of_a_request_that_has_ended_or_by_an_ingress_that_does_not_run() -> None:
    parts = Parts()
    letters(parts).store(parts.record, CRASHES)
    parts.open.remove("r")
    async with parts.tasks:
        letters(parts).store(parts.record, CRASHES)
    assert parts.messages.published == []
