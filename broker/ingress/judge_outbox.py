"""What a judge has to say to workers, collected and sent as one message per worker and kind."""

from __future__ import annotations

from collections.abc import Callable

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.messages import Abort, Answer, Answers, RunRef, Since, SinceItem
from headrace.broker.protocol.judge import JobRecord
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects


class JudgeOutbox:
    """The judge's port. `flush` after every message that was fed to the judge."""

    def __init__(self, messaging: Messaging, subjects: Subjects, on_poison: Callable[[JobRecord, int], None]) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._on_poison = on_poison
        self._answers: dict[str, list[Answer]] = {}
        self._aborts: dict[str, list[RunRef]] = {}
        self._sinces: dict[str, dict[str, SinceItem]] = {}

    def abort(self, worker: str, ref: RunRef) -> None:
        metrics.FENCED.inc()
        refs = self._aborts.setdefault(worker, [])
        if ref not in refs:
            refs.append(ref)

    def since(self, worker: str, item: SinceItem) -> None:
        self._sinces.setdefault(worker, {})[item.id] = item

    def answer(self, worker: str, answer: Answer) -> None:
        self._answers.setdefault(worker, []).append(answer)

    def poisoned(self, record: JobRecord, crashes: int) -> None:
        self._on_poison(record, crashes)

    def flush(self) -> None:
        if self._answers:
            for worker, answers in self._answers.items():
                self._messaging.send(self._subjects.control(worker), encode(Answers(answers=answers)))
            self._answers.clear()
        if self._aborts:
            for worker, refs in self._aborts.items():
                self._messaging.send(self._subjects.control(worker), encode(Abort(runs=refs)))
            self._aborts.clear()
        if self._sinces:
            for worker, items in self._sinces.items():
                metrics.GAPS.labels("gap").inc(len(items))
                self._messaging.send(self._subjects.control(worker), encode(Since(items=list(items.values()))))
            self._sinces.clear()
