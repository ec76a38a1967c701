"""The judge of one ingress decides which run of a request is current, and what its client has been given.

Sans-io.  Messages and the clock go in by method calls; everything to be sent comes out through `JudgePort`.  The rules are
those of `docs/reliability.md`: a run is adopted by its first frame or by a claim, every other run is fenced off, a gap is asked
after, an overlap is trimmed, and a request ends exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from headrace.broker.messages.control import (
    Check,
    CheckReply,
    Claim,
    ClaimReply,
    Refuse,
    RefuseReply,
    RunRef,
    RunVerdict,
    SinceItem,
    Suspicion,
    SuspicionQuery,
)
from headrace.broker.messages.events import JobEvent
from headrace.broker.messages.frames import Frame, JobFault, Row
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.quarantine import Clearance, Crash, Grant, clear_after_s, group_limit, in_words, is_poison
from headrace.broker.protocol.resume import GENERATION


class JudgePort(Protocol):
    """Sends the judge's messages. No call may block, or call back into the judge."""

    def abort(self, worker: str, ref: RunRef) -> None:
        """Stop a run that is not current."""

    def since(self, worker: str, item: SinceItem) -> None:
        """Ask the current run to send again what follows these offsets."""

    def answer(self, worker: str, verdict: RunVerdict) -> None:
        """Answer a last frame."""

    def poisoned(self, record: JobRecord, crashes: Sequence[Crash]) -> None:
        """Dead-letter a request that these crashes show to be poison."""


class Judge:
    def __init__(self, port: JudgePort) -> None:
        self._port = port
        self._open: dict[str, JobRecord] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(list(self._open.values()))

    def get(self, request_id: str) -> JobRecord | None:
        return self._open.get(request_id)

    def open(self, record: JobRecord) -> None:
        if record.id in self._open:
            raise ValueError(f"request id {record.id!r} is open already")
        self._open[record.id] = record

    def close(self, request_id: str, fault: JobFault | None) -> JobRecord | None:
        """End a request from the ingress's side (cancel, deadline, poison). None if it has ended already."""
        record = self._open.pop(request_id, None)
        if record is not None:
            record.end(fault)
        return record

    def on_frame(self, frame: Frame, now_s: float) -> None:
        """Take the rows of current runs. A first attempt without a run is adopted; every other run gets an abort."""
        worker = frame.worker
        for row in frame.rows:
            record = self._open.get(row.id)
            if record is None:
                self._stray(worker, row, known=False)
                continue
            if record.run != row.run or record.attempt != row.attempt:
                if record.run is not None or not row.attempt == 1 == record.attempt:
                    # The worker lives, so it did not crash with that attempt, whatever a mover suspected.
                    record.spare(row.attempt, worker)
                    self._stray(worker, row, known=True)
                    continue
                self._adopt(record, 1, row.run, worker)
            record.heard_s = now_s
            clearance = record.clearance
            if clearance is not None and clearance.reached(
                row.choice, row.offset + len(row.ids), now_s, ended=row.fin is not None
            ):
                record.clear()  # also when its reader is full: what counts is that the worker lives
            choice = row.choice
            if row.fin is None and 0 <= choice < record.choices and record.finished[choice] is None:
                emitted = record.emitted[choice]
                if row.offset == len(emitted):  # the next tokens of an answer, as nearly all rows are
                    if record.reader.take(row, now_s):
                        emitted += row.ids
                    else:
                        record.paused = True
                    continue
            self._on_row(record, row, worker, now_s)

    def _on_row(self, record: JobRecord, row: Row, worker: str, now_s: float) -> None:
        choice = row.choice
        if not 0 <= choice < record.choices:
            self._stray(worker, row, known=True)
            return
        if record.finished[choice] is not None:
            return
        emitted = record.emitted[choice]
        ahead = row.offset - len(emitted)
        if ahead:
            if ahead > 0:
                if not record.paused:
                    self._port.since(worker, record.offsets())
                return
            if -ahead >= len(row.ids) and row.fin is None:
                return
            row = _trim(row, -ahead)
        if not record.reader.take(row, now_s):
            record.paused = True
            return
        emitted.extend(row.ids)
        fin = row.fin
        if fin is None:
            return
        record.finished[choice] = fin
        record.open_choices -= 1
        if fin.fault is not None or record.open_choices == 0:
            del self._open[record.id]
            self._port.answer(worker, RunVerdict(record.id, row.attempt, row.run, "done"))
            record.end(fin.fault)

    def _stray(self, worker: str, row: Row, *, known: bool) -> None:
        if row.fin is not None:
            self._port.answer(worker, RunVerdict(row.id, row.attempt, row.run, "stale" if known else "unknown"))
        else:
            self._port.abort(worker, RunRef(row.id, row.attempt, row.run))

    def _adopt(self, record: JobRecord, attempt: int, run: int, worker: str) -> None:
        record.attempt, record.run, record.worker = attempt, run, worker
        record.hold(attempt, worker)

    def resume_reading(self, request_id: str) -> None:
        """Ask for the rows that a full reader did not take: it has room again."""
        record = self._open.get(request_id)
        if record is not None and record.paused:
            record.paused = False
            if record.worker is not None:
                self._port.since(record.worker, record.offsets())

    def on_claim(
        self, claim: Claim, now_s: float, *, accounted: Callable[[str], bool], alive: Callable[[str], bool]
    ) -> ClaimReply:
        """Decide a claim; on `go` the fence is set here.

        `accounted(worker)`: its process did not crash, because it is live under the same identity or has announced a drain.
        `alive(worker)`: its lease is live, as far as is known.
        """
        record = self._open.get(claim.id)
        if record is None:
            return ClaimReply(verdict="unknown")
        record.history.update(claim.history)
        if claim.attempt < record.attempt or (claim.attempt == record.attempt and record.run not in (None, claim.run)):
            return ClaimReply(verdict="stale")
        crashes = record.crashes(accounted)
        if is_poison(crashes):
            self._port.poisoned(record, crashes)
            self.close(record.id, JobFault("poison", in_words(crashes)))
            return ClaimReply(verdict="unknown")
        limit = group_limit(crashes)
        if crashes and record.recorder is not None and not record.recorder.recorded(record.evidence(crashes)):
            return ClaimReply(verdict="wait", crashes=len(crashes), limit=limit)
        if limit and not claim.beside and not 0 < claim.group <= limit:
            # Not its holder yet: the crash of another job there must not count.
            return ClaimReply(verdict="wait", crashes=len(crashes), limit=limit)
        superseded = record.run is not None and record.run != claim.run
        if superseded and record.worker is not None and record.run is not None:
            self._port.abort(record.worker, RunRef(record.id, record.attempt, record.run))
            if alive(record.worker) and all(crash.worker != record.worker for crash in crashes):
                record.spare(record.attempt, record.worker)
        self._adopt(record, claim.attempt, claim.run, claim.worker)
        record.heard_s = now_s
        clear_s = 0.0
        record.clearance = None
        if crashes:
            clear_s = clear_after_s(record.clearances)
            still_open = [choice for choice, fin in enumerate(record.finished) if fin is None]
            record.clearance = Clearance([len(ids) for ids in record.emitted], still_open, clear_s)
            if limit and claim.group:
                record.granted[claim.attempt, claim.worker] = Grant(claim.group, claim.beside)
        return ClaimReply(
            verdict="go",
            emitted=[list(ids) for ids in record.emitted],
            finished=[i for i, fin in enumerate(record.finished) if fin is not None],
            crashes=len(crashes),
            limit=limit,
            clear_s=clear_s,
        )

    def on_suspicion(self, query: SuspicionQuery, *, accounted: Callable[[str], bool]) -> Suspicion:
        """Say how suspect a job is. Nothing is decided; its entries are remembered, as those of a claim are."""
        record = self._open.get(query.id)
        if record is None:
            return Suspicion()
        record.history.update(query.history)
        crashes = record.crashes(accounted)
        return Suspicion(limit=group_limit(crashes), crashes=len(crashes))

    def on_check(self, check: Check, now_s: float) -> CheckReply:
        """Answer a worker that is back from a lapse. A first attempt without a run is adopted, as by a first frame."""
        reply = CheckReply(verdicts=[])
        for ref in check.runs:
            record = self._open.get(ref.id)
            if record is None:
                reply.verdicts.append("unknown")
                continue
            if record.run is None and ref.attempt == 1 == record.attempt:
                self._adopt(record, 1, ref.run, check.worker)
            if (record.attempt, record.run) == (ref.attempt, ref.run):
                record.heard_s = now_s
                reply.verdicts.append("current")
            else:
                record.spare(ref.attempt, check.worker)
                reply.verdicts.append("stale")
        return reply

    def on_refuse(self, refuse: Refuse) -> RefuseReply:
        """End a request that a worker or router refuses, unless a newer attempt or a run of this one is current."""
        record = self._open.get(refuse.id)
        if record is None:
            return RefuseReply(verdict="unknown")
        if refuse.attempt < record.attempt or (refuse.attempt == record.attempt and record.run is not None):
            return RefuseReply(verdict="stale")
        self.close(record.id, refuse.fault)
        return RefuseReply(verdict="done")

    def on_event(self, event: JobEvent) -> None:
        """Take a job event. `started` proves that a worker had an attempt, also when no frame of it arrived."""
        if event.kind == "started":
            record = self._open.get(event.id)
            if record is not None:
                record.hold(event.attempt, event.worker)

    def silent(self, now_s: float, after_s: float) -> list[JobRecord]:
        """Return the open requests without a frame for `after_s`. Asking counts as hearing, so each is asked once a period."""
        quiet = [r for r in self._open.values() if now_s - r.heard_s >= after_s and not r.paused]
        for record in quiet:
            record.heard_s = now_s
        return quiet

    def on_lapse(self) -> Iterable[tuple[JobRecord, int]]:
        """Begin a new generation of every open request, because this ingress may have looked dead.

        Returns (record, attempt) of each, to be submitted again. The old run goes on until the new copy claims.
        """
        for record in self._open.values():
            record.generation += 1
        return [(record, record.generation * GENERATION) for record in self._open.values()]


def _trim(row: Row, skip: int) -> Row:
    return msgspec.structs.replace(
        row,
        offset=row.offset + min(skip, len(row.ids)),
        ids=row.ids[skip:],
        texts=row.texts[skip:],
        logprobs=row.logprobs[skip:] if row.logprobs else row.logprobs,
    )
