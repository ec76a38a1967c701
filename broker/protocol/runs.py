"""The run table of one worker, and the tombstones of requests that were cancelled lately.

Sans-io.  A run is keyed by the stored stream sequence of its WORK message: a redelivery of a sequence that is held here, in
whatever state, only replaces the ack handle.  An attempt that was started is never started again under another run.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.broker.messages import RunRef
from headrace.broker.protocol.run import STARTED, Run, RunState
from headrace.jetstream.ports import Delivery


class RunTable:
    """The runs of one worker, by the stream sequence of their messages and by request id."""

    def __init__(self) -> None:
        self._by_seq: dict[int, Run] = {}
        self._by_id: dict[str, list[Run]] = {}
        self._alone: set[Run] = set()
        self.sequences = 0  # choices of all runs, each of which takes one slot of the engine

    def __len__(self) -> int:
        return len(self._by_seq)

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._by_seq.values()))

    def displaced(self, delivery: Delivery) -> Run | None:
        """Find the run under this sequence if it is of another message, because the stream was deleted and made again."""
        run = self._by_seq.get(delivery.stream_seq)
        return run if run is not None and run.delivery.data != delivery.data else None

    def redelivered(self, delivery: Delivery) -> bool:
        """Replace the ack handle if this stored message is held here already. False if it is not."""
        run = self._by_seq.get(delivery.stream_seq)
        if run is None:
            return False
        run.delivery = delivery
        return True

    def add(self, run: Run) -> None:
        """Hold a run. Raises ValueError if its sequence has a run already."""
        if run.seq in self._by_seq:
            raise ValueError(f"stream sequence {run.seq} has a run already")
        self._by_seq[run.seq] = run
        self.sequences += run.envelope.choices
        self.set_crashes(run, run.crashes)
        self._by_id.setdefault(run.id, []).append(run)

    def of(self, request_id: str) -> list[Run]:
        """List the runs of one request."""
        return list(self._by_id.get(request_id, ()))

    def find(self, ref: RunRef) -> Run | None:
        """Find the run of this request, attempt and run id."""
        for run in self._by_id.get(ref.id, ()):
            if run.attempt == ref.attempt and run.run == ref.run:
                return run
        return None

    def remove(self, run: Run) -> bool:
        """Forget a run. False if it was forgotten before."""
        if run.gone:
            return False
        run.forget()
        del self._by_seq[run.seq]
        self.sequences -= run.envelope.choices
        self._alone.discard(run)
        same = self._by_id[run.id]
        same.remove(run)
        if not same:
            del self._by_id[run.id]
        return True

    def may_start(self, run: Run) -> bool:
        """Keep suspect jobs alone: false while one is here, or while this run is suspect itself and others have started.

        A suspect job that waits for the others to end holds new ones back, because on a busy worker it would wait forever.
        """
        if not self._alone and not run.alone:
            return True  # the usual case
        for other in self._by_seq.values():
            if other is run:
                continue
            started = other.state in STARTED
            if (run.alone and started) or (other.alone and (started or (not run.alone and other.state is RunState.WAITING))):
                return False
        return True

    @property
    def any_alone(self) -> bool:
        """A suspect job is here, which runs alone."""
        return bool(self._alone)

    def set_crashes(self, run: Run, crashes: int) -> None:
        """Set the number of the job's crashes, which decides whether it runs alone."""
        run.crashes = crashes
        (self._alone.add if run.alone else self._alone.discard)(run)


class Tombstones:
    """Recently cancelled request ids. Bounded in time and number: a backstop, not a promise."""

    def __init__(self, *, keep_s: float, limit: int = 100_000) -> None:
        self._keep_s = keep_s
        self._limit = limit
        self._until: dict[str, float] = {}

    def add(self, request_id: str, now_s: float) -> None:
        """Remember a request id, and forget the oldest one beyond the limit."""
        self._until[request_id] = now_s + self._keep_s
        if len(self._until) > self._limit:
            del self._until[next(iter(self._until))]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._until

    def expire(self, now_s: float) -> None:
        """Forget the ids whose time is over. Insertion order is expiry order."""
        for request_id, until in list(self._until.items()):
            if until > now_s:
                break
            del self._until[request_id]
