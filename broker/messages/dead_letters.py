"""Dead letters."""

from __future__ import annotations

from headrace.broker.messages.base import Record
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.requests import Envelope


class DeadLetter(Record, frozen=True, omit_defaults=True, kw_only=True):
    """On hr.dlq.<pool>: a job taken out of service, with everything needed to look at it or try again."""

    envelope: Envelope
    reason: str
    attempt: int
    history: list[HistoryEntry]
    at: float


class Unreadable(Record, frozen=True, omit_defaults=True, kw_only=True):
    """On hr.dlq.<pool>: a message of one of our queues that nobody could read. `data`: the beginning of it."""

    subject: str
    why: str
    data: bytes
    at: float
