"""The run table of one worker, and the tombstones of requests that were cancelled lately.

Sans-io.  A run is keyed by the stored stream sequence of its WORK message: a redelivery of a sequence that is held here, in
whatever state, only replaces the ack handle.  An attempt that was started is never started again under another run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from headrace.broker.jobs import RUN_MARK, job_of_run
from headrace.broker.messages.control import RunRef
from headrace.broker.messages.frames import Row
from headrace.broker.protocol.run import STARTED, Run, RunState

# The order on a trial worker: which suspect may start, and what the worker promises its judge for it.
#
# A worker on trial starts suspects only, and never more of them at once than the smallest limit among them allows. The most
# suspect one goes first. What runs there already is moved away where others have room (`broker/worker/quarantine.py`), and a
# suspect waits for that, but not forever: in the end it starts beside the others, and its crash is no proof then. So a job
# that crashes again and again beside others waits longer each time: in a pool of one worker nothing can be moved away.


class Turn(NamedTuple):
    """The promise under which a run starts: at most `group` suspects at once (0 = no limit); `beside`: other jobs run there."""

    group: int
    beside: bool = False


ORDINARY = Turn(0)
PATIENT_CRASHES = 3  # up to so many the patience of a suspect is the usual one
LONGEST_S = 60.0


def alone_after_s(crashes: int, patience_s: float) -> float:
    """Return how long a suspect that is to run alone waits for others to leave, before it starts beside them."""
    return max(patience_s, min(patience_s * 2.0 ** min(max(0, crashes - PATIENT_CRASHES), 16), LONGEST_S))


def turn_of_suspect(run: Run, suspects: Sequence[Run], runs: Iterable[Run], *, overdue: bool) -> Turn | None:
    """Return the promise under which this suspect may start now, or None. `suspects` and `runs` are those of the worker.

    Jobs that were suspect and are cleared keep only a suspect waiting that is to run alone.
    """
    others = [other for other in suspects if other is not run]
    started = [other for other in others if other.state in STARTED]
    if len(started) >= min([run.limit, *(other.limit for other in started)]):
        return None
    if any(other.state is RunState.WAITING and _rank(other) < _rank(run) for other in others):
        return None
    beside = [other for other in runs if other is not run and not other.suspect and other.state in STARTED]
    if beside and not overdue and (run.limit == 1 or not all(other.cleared for other in beside)):
        return None
    return Turn(run.limit, beside=bool(beside))


def all_beside(suspects: Sequence[Run], runs: Iterable[Run]) -> bool:
    """Return True if these suspects have started beside other jobs or are to, and none of them waits to run alone.

    `runs` are those of a worker from which nothing can be moved away.
    """
    if any(run.limit == 1 or (run.state in STARTED and not run.beside) for run in suspects):
        return False
    return any(run.state in STARTED and (run.beside or not run.suspect) for run in runs)


def _rank(run: Run) -> tuple[int, int, int]:
    return run.limit, -run.crashes, run.seq


class RunTable:
    def __init__(self) -> None:
        self._by_seq: dict[int, Run] = {}
        self._by_id: dict[str, list[Run]] = {}
        self._suspects: dict[Run, None] = {}  # in the order in which they became suspects
        self.batch: dict[Run, None] = {}  # runs of class batch, in the order in which they came
        self.alone = False  # no other worker serves the pool: nothing can be moved away from suspects
        self.sequences = 0  # choices of all runs, each of which takes one slot of the engine

    def __len__(self) -> int:
        return len(self._by_seq)

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._by_seq.values()))

    def at(self, seq: int) -> Run | None:
        """Return the run of this stream sequence. It is another message's if the stream was deleted and made again."""
        return self._by_seq.get(seq)

    def add(self, run: Run) -> None:
        if run.seq in self._by_seq:
            raise ValueError(f"stream sequence {run.seq} has a run already")
        self._by_seq[run.seq] = run
        self.sequences += run.envelope.choices
        if run.batch:
            self.batch[run] = None
        if run.limit:
            self._suspects[run] = None
        self._by_id.setdefault(run.id, []).append(run)

    def of(self, request_id: str) -> list[Run]:
        return list(self._by_id.get(request_id, ()))

    def of_job(self, job: str) -> list[Run]:
        return [run for same in self._by_id.values() for run in same if RUN_MARK in run.id and job_of_run(run.id) == job]

    def find(self, ref: RunRef | Row) -> Run | None:
        for run in self._by_id.get(ref.id, ()):
            if run.attempt == ref.attempt and run.run == ref.run:
                return run
        return None

    def remove(self, run: Run) -> bool:
        """Forget a run. False if it was forgotten before."""
        if run.state is RunState.GONE:
            return False
        run.forget()
        del self._by_seq[run.seq]
        self.sequences -= run.envelope.choices
        self._suspects.pop(run, None)
        if run in self.batch:
            del self.batch[run]
        same = self._by_id[run.id]
        same.remove(run)
        if not same:
            del self._by_id[run.id]
        return True

    def turn(self, run: Run, *, overdue: bool = False) -> Turn | None:
        """Return the promise under which a waiting run may start now, or None. `overdue`: a suspect has waited long enough.

        A suspect that waits for others to leave holds ordinary runs back, because on a busy worker it would wait forever.  On
        the only worker of a pool one that may have company does not wait for that.
        """
        if run.suspect:
            overdue = overdue or (self.alone and run.limit > 1)
            return turn_of_suspect(run, self.suspects, self._by_seq.values(), overdue=overdue)
        return None if self.on_trial else ORDINARY

    @property
    def suspects(self) -> list[Run]:
        """The uncleared suspects that run or wait here."""
        return [run for run in self._suspects if not run.stopping]

    @property
    def on_trial(self) -> bool:
        """Uncleared suspects run or wait here, and nothing else starts.

        Not so where all of them have started beside others, or are to, because there is no other worker: their crash would be
        no proof in any case.
        """
        if not self._suspects or not (suspects := self.suspects):
            return False
        return not self.alone or not all_beside(suspects, self._by_seq.values())

    @property
    def group_limit(self) -> int:
        """The smallest group limit among the suspects here; 0 = there are none."""
        return min((run.limit for run in self._suspects if not run.stopping), default=0)

    def suspect(self, run: Run, limit: int, crashes: int) -> None:
        """Set how suspect a job is, as its judge says: `limit` 0 = not at all."""
        run.limit, run.crashes = limit, crashes
        if limit:
            self._suspects[run] = None
        else:
            self._suspects.pop(run, None)

    def clear(self, run: Run) -> None:
        """Take a run for an ordinary one from now on: its judge has cleared it."""
        run.cleared = True
        self.suspect(run, 0, 0)


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

    def __contains__(self, request_id: str) -> bool:
        """Return True for a cancelled request, and for every run of a cancelled job."""
        return request_id in self._until or (RUN_MARK in request_id and job_of_run(request_id) in self._until)

    def expire(self, now_s: float) -> None:
        """Forget the ids whose time is over. Insertion order is expiry order."""
        for request_id, until in list(self._until.items()):
            if until > now_s:
                break
            del self._until[request_id]
