"""Tells messages that a process has published to a subject from those that the server sends there as its answer to a question.

A message that was read from a stream has the headers of its place there, and one that was pulled keeps its own subject.
Subscriptions drop such messages, and questions are answered at inboxes only.
"""

from __future__ import annotations

INBOXES = (b"_INBOX", b"_R_.")  # of processes, and of those in other accounts

_STREAM_HEADERS = (b"\r\nnats-stream:", b"\r\nnats-subject:", b"\r\nnats-sequence:")


class SubjectPattern:
    """The subject of a subscription, with or without wildcards."""

    def __init__(self, subject: str) -> None:
        self._exact = subject.encode()
        self._tokens = self._exact.split(b".")
        self._wild = bool({b"*", b">"} & set(self._tokens))

    def covers(self, subject: bytes) -> bool:
        """Return True for a subject of which the subscription gets what is published."""
        if not self._wild:
            return subject == self._exact
        given = subject.split(b".")
        for at, token in enumerate(self._tokens):
            if token == b">":
                return len(given) > at
            if at >= len(given) or token not in (b"*", given[at]):
                return False
        return len(given) == len(self._tokens)


def from_stream(headers: bytes) -> bool:
    """Return True for the header block of a message that the server has read from a stream."""
    lowered = headers.lower()
    return any(name in lowered for name in _STREAM_HEADERS)
