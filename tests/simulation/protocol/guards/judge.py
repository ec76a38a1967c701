"""Rules of the judge, each with a way to take it out of force."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.ingress.submission import Submission
from headrace.broker.messages.control import Check, CheckReply, ClaimReply, Refuse, RefuseReply
from headrace.broker.messages.frames import Frame, Row
from headrace.broker.protocol import judge
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from tests.simulation.protocol.guards.registry import guard


@guard
def frames_of_other_runs_are_dropped(patch: pytest.MonkeyPatch) -> None:
    def on_frame(self: Judge, frame: Frame, now_s: float) -> None:
        for row in frame.rows:
            if (record := self._open.get(row.id)) is not None:
                self._on_row(record, row, frame.worker)

    patch.setattr(Judge, "on_frame", on_frame)


@guard
def an_overlap_is_trimmed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(judge, "_trim", lambda row, skip: row)


@guard
def a_gap_is_asked_after(patch: pytest.MonkeyPatch) -> None:
    real = Judge._on_row

    def on_row(self: Judge, record: JobRecord, row: Row, worker: str) -> None:
        if 0 <= row.choice < record.choices and row.offset > len(record.emitted[row.choice]):
            record.emitted[row.choice] += [0] * (row.offset - len(record.emitted[row.choice]))
        real(self, record, row, worker)

    patch.setattr(Judge, "_on_row", on_row)


@guard
def a_claim_sets_the_fence(patch: pytest.MonkeyPatch) -> None:
    real = Judge._adopt

    def adopt(self: Judge, record: JobRecord, attempt: int, run: int, worker: str) -> None:
        if attempt == 1:
            real(self, record, attempt, run, worker)
        else:
            record.hold(attempt, worker)

    patch.setattr(Judge, "_adopt", adopt)


@guard
def an_older_attempt_is_stale(patch: pytest.MonkeyPatch) -> None:
    real = Judge.on_claim

    def on_claim(self: Judge, claim: Any, now_s: float, **options: Any) -> ClaimReply:
        record = self.get(claim.id)
        if record is not None:
            record.attempt, record.run = min(record.attempt, claim.attempt), None
        return real(self, claim, now_s, **options)

    patch.setattr(Judge, "on_claim", on_claim)


@guard
def a_check_adopts_like_a_first_frame(patch: pytest.MonkeyPatch) -> None:
    real = Judge.on_check

    def on_check(self: Judge, check: Check, now_s: float) -> CheckReply:
        for ref in check.runs:
            record = self.get(ref.id)
            if record is not None and record.run is None:
                return CheckReply(verdicts=["stale"] * len(check.runs))
        return real(self, check, now_s)

    patch.setattr(Judge, "on_check", on_check)


@guard
def a_refusal_is_fenced(patch: pytest.MonkeyPatch) -> None:
    def on_refuse(self: Judge, refuse: Refuse) -> RefuseReply:
        self.close(refuse.id, refuse.fault)
        return RefuseReply(verdict="done")

    patch.setattr(Judge, "on_refuse", on_refuse)


@guard
def a_lapsed_judge_submits_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Submission, "on_lease", lambda self, held: None)


@guard
def submitted_again_means_a_new_generation(patch: pytest.MonkeyPatch) -> None:
    def on_lapse(self: Judge) -> list[tuple[JobRecord, int]]:
        return [(record, record.attempt) for record in self._open.values()]

    patch.setattr(Judge, "on_lapse", on_lapse)
