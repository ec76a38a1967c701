"""Rules of a worker, each with a way to take it out of force."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from headrace.broker.messages.control import Abort, ClaimReply
from headrace.broker.protocol import judge, quarantine, runs
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import ORDINARY, RunTable, Turn
from headrace.broker.worker import outbox
from headrace.broker.worker import runs as worker_runs
from headrace.broker.worker.inbox import Inbox
from headrace.broker.worker.runs import Admission, WorkerRuns
from tests.simulation.protocol.guards.registry import guard
from tests.simulation.virtual.messaging import SimMessaging


@guard
def runs_are_keyed_by_sequence(patch: pytest.MonkeyPatch) -> None:
    remove = RunTable.remove

    def at(self: RunTable, seq: int) -> Run | None:
        if (old := self._by_seq.pop(seq, None)) is not None:
            self._by_seq[-old.run] = old
        return None

    def remove_any(self: RunTable, run: Run) -> bool:
        newer = self._by_seq.get(run.seq)
        if -run.run in self._by_seq:
            self._by_seq[run.seq] = self._by_seq.pop(-run.run)
        done = remove(self, run)
        if newer is not None and newer is not run:
            self._by_seq[newer.seq] = newer
        return done

    patch.setattr(RunTable, "at", at)
    patch.setattr(RunTable, "remove", remove_any)


@guard
def a_missing_consumer_is_made_again(patch: pytest.MonkeyPatch) -> None:
    real = SimMessaging.pull

    def pull(self: SimMessaging, *args: Any, **options: Any) -> Any:
        return real(self, *args, **(options | {"on_missing": None}))

    patch.setattr(SimMessaging, "pull", pull)


@guard
def a_payload_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    real = worker_runs.fetch_payload

    async def fetch_once(messaging: Any, subjects: Any, envelope: Any, *, wanted: Any) -> bytes:
        tries = iter((True, True, True))
        return await real(messaging, subjects, envelope, wanted=lambda: wanted() and next(tries, False))

    patch.setattr(worker_runs, "fetch_payload", fetch_once)


@guard
def an_abort_names_a_run(patch: pytest.MonkeyPatch) -> None:
    def on_abort(self: Inbox, control: Abort, _: str) -> None:
        for ref in control.runs:
            for run in self._runs.table.of(ref.id):
                self._runs.drop(run, how="stale")

    patch.setattr(Inbox, "_on_abort", on_abort)


@guard
def an_end_is_confirmed_before_it_is_acked(patch: pytest.MonkeyPatch) -> None:
    real = Run.end

    def end(self: Run, now_s: float) -> None:
        real(self, now_s)
        self.delivery.ack()

    patch.setattr(Run, "end", end)


@guard
def an_unanswered_end_is_sent_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outbox.TokenOutbox, "repeat_end", lambda self, run, now_s, every_s: None)


@guard
def a_lapsed_worker_asks_its_judges(patch: pytest.MonkeyPatch) -> None:
    def recheck(self: WorkerRuns) -> None:
        for run in self.table:
            if run.state is RunState.LAPSED and self._presence.lease.held:
                self.drop(run, how="lapsed")

    patch.setattr(WorkerRuns, "recheck_lapsed", recheck)


@guard
def suspects_run_in_groups_that_are_small_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runs, "turn_of_suspect", lambda run, suspects, others, overdue: Turn(run.limit))


@guard
def ordinary_runs_do_not_start_beside_suspects(patch: pytest.MonkeyPatch) -> None:
    real = RunTable.turn

    def turn(self: RunTable, run: Run, *, overdue: bool = False) -> Turn | None:
        return real(self, run, overdue=overdue) if run.suspect else ORDINARY

    patch.setattr(RunTable, "turn", turn)


@guard
def a_suspect_is_not_granted_without_a_promise(patch: pytest.MonkeyPatch) -> None:
    real = Judge.on_claim

    def on_claim(self: Judge, claim: Any, now_s: float, **options: Any) -> ClaimReply:
        reply = real(self, msgspec.structs.replace(claim, beside=True), now_s, **options)
        return msgspec.structs.replace(reply, limit=0)

    patch.setattr(Judge, "on_claim", on_claim)


@guard
def groups_shrink(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quarantine, "SHRINK", 1)


@guard
def progress_clears(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobRecord, "clear", lambda self: None)


@guard
def progress_clears_only_well_past_the_crash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quarantine, "CLEAR_TOKENS", 0)
    patch.setattr(judge, "clear_after_s", lambda clearances: 0.0)


@guard
def a_dead_engine_starts_nothing(patch: pytest.MonkeyPatch) -> None:
    async def turn_of(self: Admission, run: Run, began_s: float) -> Turn | None:
        while run.state is RunState.WAITING and (turn := self._runs.table.turn(run, overdue=True)) is None:
            await asyncio.sleep(0.1)
        if run.state is not RunState.WAITING:
            return None
        run.claim()
        return turn

    patch.setattr(Admission, "_turn_of", turn_of)
    patch.setattr(WorkerRuns, "engine_dead", property(lambda self: False, lambda self, value: None), raising=False)
