"""Defines dead letters, which are stored on hr.dlq.<pool>."""

from __future__ import annotations

from headrace.broker.messages.base import Record
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.requests import Envelope


class DeadLetter(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A job taken out of service, with everything that is needed to inspect or retry it."""

    envelope: Envelope
    reason: str
    attempt: int
    history: list[HistoryEntry]
    at: float


class Unreadable(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A queued message that could not be decoded. `data` is its beginning."""

    subject: str
    why: str
    data: bytes
    at: float
