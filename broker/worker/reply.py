"""Answers a control message, if its sender waits for an answer."""

from __future__ import annotations

from headrace.broker.codec import encode
from headrace.broker.messages import Record
from headrace.jetstream.ports import Messaging


def reply(messaging: Messaging, subject: str, answer: Record) -> None:
    """Send `answer` to a reply subject. An empty subject means that no answer is expected."""
    if subject:
        messaging.send(subject, encode(answer))
