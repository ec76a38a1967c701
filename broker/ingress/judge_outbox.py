"""Sends the judge's messages to workers, collected into one message per worker and kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.messages import Abort, Answers, Record, RunRef, RunVerdict, Since, SinceItem
from headrace.broker.protocol.crashes import Crash
from headrace.broker.protocol.job_record import JobRecord
from headrace.jetstream.errors import PayloadTooLarge, SubjectError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()


class JudgeOutbox:
    """The judge's port. `flush` must follow every message that was fed to the judge."""

    def __init__(
        self, messaging: Messaging, subjects: Subjects, on_poison: Callable[[JobRecord, Sequence[Crash]], None]
    ) -> None:
        """`on_poison(record, crashes)` is called for a request that crashes its workers."""
        self._messaging = messaging
        self._subjects = subjects
        self._on_poison = on_poison
        self._answers: dict[str, list[RunVerdict]] = {}
        self._aborts: dict[str, list[RunRef]] = {}
        self._sinces: dict[str, dict[str, SinceItem]] = {}

    def abort(self, worker: str, ref: RunRef) -> None:
        """Collect the order to stop a run, once per run."""
        metrics.FENCED.inc()
        refs = self._aborts.setdefault(worker, [])
        if ref not in refs:
            refs.append(ref)

    def since(self, worker: str, item: SinceItem) -> None:
        """Collect a question for missing tokens. A later one for the same request replaces it."""
        self._sinces.setdefault(worker, {})[item.id] = item

    def answer(self, worker: str, verdict: RunVerdict) -> None:
        """Collect the verdict on a run's last frame."""
        self._answers.setdefault(worker, []).append(verdict)

    def poisoned(self, record: JobRecord, crashes: Sequence[Crash]) -> None:
        """Report a request that these crashes show to be poison."""
        self._on_poison(record, crashes)

    def reply(self, subject: str, reply: Record) -> None:
        """Send the messages collected so far, then `reply`, unless the question named no subject for it."""
        self.flush()
        if subject:
            self._messaging.send(subject, encode(reply))

    def flush(self) -> None:
        """Send the collected messages: one per worker and kind."""
        # Each is taken out before it is sent: one that cannot be sent must not come again with every later message.
        while self._answers:
            worker, answers = self._answers.popitem()
            self._send(worker, Answers(answers=answers))
        while self._aborts:
            worker, refs = self._aborts.popitem()
            self._send(worker, Abort(runs=refs))
        while self._sinces:
            worker, items = self._sinces.popitem()
            metrics.GAPS.labels("gap").inc(len(items))
            self._send(worker, Since(items=list(items.values())))

    def _send(self, worker: str, message: Record) -> None:
        try:
            self._messaging.send(self._subjects.control(worker), encode(message))
        except (SubjectError, PayloadTooLarge) as error:
            metrics.FAILED_MESSAGES.labels("verdict").inc()
            log.error("verdict.not_sent", worker=worker[:80], error=str(error))
