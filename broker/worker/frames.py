"""Encodes token frames: one message per engine step and ingress, split only when it would be too large."""

from __future__ import annotations

from functools import lru_cache

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.messages import Frame, Row
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects


class FrameSender:
    """Encodes and sends rows. The caller has checked that they may be sent."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, worker: str, max_bytes: int) -> None:
        self._messaging = messaging
        self._worker = worker
        self._max_bytes = max_bytes
        self._subject_of = lru_cache(maxsize=1024)(subjects.out)

    def send(self, judge: str, rows: list[Row]) -> None:
        """Send rows to one ingress, in order."""
        data = encode(Frame(worker=self._worker, rows=rows))
        if len(data) > self._max_bytes:
            self._send_split(judge, rows)
            return
        metrics.FRAMES.inc()
        metrics.ROWS.inc(len(rows))
        self._messaging.send(self._subject_of(judge), data)

    def _send_split(self, judge: str, rows: list[Row]) -> None:
        if len(rows) > 1:
            middle = len(rows) // 2
            self.send(judge, rows[:middle])
            self.send(judge, rows[middle:])
            return
        row = rows[0]
        if len(row.ids) < 2:  # cannot be made smaller: the server's own limit decides
            metrics.FRAMES.inc()
            metrics.ROWS.inc()
            self._messaging.send(self._subject_of(judge), encode(Frame(worker=self._worker, rows=rows)))
            return
        for part in split_row(row):
            self.send(judge, [part])


def split_row(row: Row) -> tuple[Row, Row]:
    """Split the tokens of a row in two. The end goes with the second."""
    middle = len(row.ids) // 2
    first = Row(
        row.id,
        row.attempt,
        row.run,
        row.choice,
        row.offset,
        row.ids[:middle],
        row.texts[:middle],
        row.logprobs[:middle] if row.logprobs is not None else None,
    )
    second = Row(
        row.id,
        row.attempt,
        row.run,
        row.choice,
        row.offset + middle,
        row.ids[middle:],
        row.texts[middle:],
        row.logprobs[middle:] if row.logprobs is not None else None,
        row.fin,
    )
    return first, second
