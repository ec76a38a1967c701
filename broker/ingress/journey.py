"""The journey of a request as its ingress saw it: its wait in the queue, the workers that ran it, and how it ended."""

from __future__ import annotations

from headrace.broker import metrics
from headrace.broker.ingress.story_book import StoryBook
from headrace.broker.messages import JobFault, Story
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.resume import GENERATION


class Journey:
    """Collects what an ingress hears of one request anyway. Times are those of its event loop."""

    __slots__ = ("_book", "_over", "_record", "_runs", "_submitted_s", "queue_s", "story")

    def __init__(self, record: JobRecord, submitted_s: float, book: StoryBook | None = None) -> None:
        """`book` is told of the end."""
        self._book = book
        self._record = record
        self._submitted_s = submitted_s
        self._over = False
        self.story: Story | None = None  # once it has ended; events that come late are added to it
        self._runs: list[tuple[int, str]] = []  # attempt, worker
        self.queue_s: float | None = None  # from its submission to its first start in a worker; None = that was not heard

    def started(self, attempt: int, worker: str, now_s: float) -> None:
        """Note that a worker has started an attempt."""
        if self.queue_s is None:
            self.queue_s = now_s - self._submitted_s
        self._runs.append((attempt, worker))

    def ended(self, fault: JobFault | None) -> None:
        """Note the end: a fault or, None, an answer. The first one counts."""
        if self._over:
            return
        self._over = True
        metrics.count_end(None if fault is None else fault.code)
        if self._book is not None:
            self.story = self._book.end(self._record.id, fault)

    @property
    def workers(self) -> list[str]:
        """The workers that had it, in the order of attempts, each once."""
        record = self._record
        if len(self._runs) == 1 and self._runs[0][1] == record.worker:
            return [record.worker]
        runs = [*self._runs, (record.attempt, record.worker)] if record.worker is not None else self._runs
        return list(dict.fromkeys(worker for _, worker in sorted(runs)))

    @property
    def attempts(self) -> int:
        """The number of times that it was given to a worker, as far as is known; 0 = never."""
        if len(self._runs) == 1 == self._record.attempt:
            return 1
        workers = len(self.workers)
        return max(len(self._runs), workers, self._record.attempt % GENERATION if workers else 0)

    @property
    def finish_reasons(self) -> list[str]:
        """The reasons why its choices ended, each once; empty for one that ended in an error or was given up."""
        return list(dict.fromkeys(fin.reason for fin in self._record.finished if fin is not None and fin.fault is None))
