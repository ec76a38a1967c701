"""The rules of the job protocol, each with a way to take it out of force.

`test_guards.py` shows that the search finds what breaks without it.  A rule whose absence nobody notices would be one
that no test holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.broker.ingress import claims
from headrace.broker.ingress.resubmitter import Resubmitter
from headrace.broker.membership.janitor import Janitor
from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import Mover
from headrace.broker.messages import Abort, Check, CheckReply, ClaimReply, Frame, HistoryEntry, Refuse, RefuseReply, Row
from headrace.broker.protocol import clearance, group_testing, job_record, judge, runs
from headrace.broker.protocol.job_record import JobRecord
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.protocol.runs import RunTable
from headrace.broker.protocol.trial import ORDINARY, Turn
from headrace.broker.worker import judge_client, run_admission, token_outbox
from headrace.broker.worker.gone_judges import GoneJudges
from headrace.broker.worker.inbox import JudgeInbox
from headrace.broker.worker.lapses import Lapses
from headrace.broker.worker.run_admission import RunAdmission
from headrace.broker.worker.state import WorkerState
from headrace.jetstream.errors import NoResponder
from headrace.jetstream.ports import Delivery
from headrace.router.placement.types import Placement
from headrace.router.session.held_request import HeldRequest
from headrace.router.session.placement_outcomes import PlacementOutcomes
from headrace.router.session.placer import Placer
from headrace.router.session.refusals import Refuser
from headrace.router.session.state import ServingPermission
from tests.simulation.virtual.messaging import SimMessaging
from tests.simulation.virtual.server import SimServer

Guard = Callable[[pytest.MonkeyPatch], None]
GUARDS: dict[str, Guard] = {}


def guard(function: Guard) -> Guard:
    GUARDS[function.__name__] = function
    return function


# -- transfers ----------------------------------------------------------------------------------------------------------------


@guard
def publish_before_delete(patch: pytest.MonkeyPatch) -> None:
    real = Mover._publish

    async def publish(self: Mover, envelope: Any, data: bytes, attempt: int, history: Any, source_seq: int) -> None:
        await self._delete(source_seq)
        await real(self, envelope, data, attempt, history, source_seq)

    patch.setattr(Mover, "_publish", publish)


@guard
def a_moved_copy_is_a_new_attempt(patch: pytest.MonkeyPatch) -> None:
    real = Mover._publish

    async def publish(self: Mover, envelope: Any, data: bytes, attempt: int, history: Any, source_seq: int) -> None:
        await real(self, envelope, data, attempt - 1, history, source_seq)

    patch.setattr(Mover, "_publish", publish)


# -- the router ---------------------------------------------------------------------------------------------------------------


@guard
def a_request_is_placed_before_it_is_acked(patch: pytest.MonkeyPatch) -> None:
    real = Placer.place

    def place(self: Placer, held: HeldRequest, placement: Placement) -> None:
        held.delivery.ack()
        real(self, held, placement)

    patch.setattr(Placer, "place", place)


@guard
def a_judge_hears_of_a_refusal_before_the_ack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Refuser, "refuse", lambda self, held, fault: self._release.settle(held, "refused"))


@guard
def a_full_worker_is_not_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlacementOutcomes, "full", lambda self, held, placement: self._release.settle(held, "full"))


@guard
def a_router_decides_under_its_lease_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServingPermission, "granted", property(lambda self: not self.draining))


# -- the worker ---------------------------------------------------------------------------------------------------------------


@guard
def runs_are_keyed_by_sequence(patch: pytest.MonkeyPatch) -> None:
    remove = RunTable.remove

    def redelivered(self: RunTable, delivery: Delivery) -> bool:
        if (old := self._by_seq.pop(delivery.stream_seq, None)) is not None:
            self._by_seq[-old.run] = old
        return False

    def remove_any(self: RunTable, run: Run) -> bool:
        newer = self._by_seq.get(run.seq)
        if -run.run in self._by_seq:
            self._by_seq[run.seq] = self._by_seq.pop(-run.run)
        done = remove(self, run)
        if newer is not None and newer is not run:
            self._by_seq[newer.seq] = newer
        return done

    patch.setattr(RunTable, "redelivered", redelivered)
    patch.setattr(RunTable, "remove", remove_any)


@guard
def a_missing_consumer_is_made_again(patch: pytest.MonkeyPatch) -> None:
    real = SimMessaging.pull

    def pull(self: SimMessaging, *args: Any, **options: Any) -> Any:
        return real(self, *args, **(options | {"on_missing": None}))

    patch.setattr(SimMessaging, "pull", pull)


@guard
def a_payload_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    real = run_admission.fetch_payload

    async def fetch_once(messaging: Any, subjects: Any, envelope: Any, *, wanted: Any) -> bytes:
        tries = iter((True, True, True))
        return await real(messaging, subjects, envelope, wanted=lambda: wanted() and next(tries, False))

    patch.setattr(run_admission, "fetch_payload", fetch_once)


@guard
def an_abort_names_a_run(patch: pytest.MonkeyPatch) -> None:
    def on_abort(self: JudgeInbox, control: Abort) -> None:
        for ref in control.runs:
            for run in self._state.runs.of(ref.id):
                self._runs.drop(run, how="stale")

    patch.setattr(JudgeInbox, "on_abort", on_abort)


@guard
def an_end_is_confirmed_before_it_is_acked(patch: pytest.MonkeyPatch) -> None:
    real = Run.end

    def end(self: Run, now_s: float) -> None:
        real(self, now_s)
        self.delivery.ack()

    patch.setattr(Run, "end", end)


@guard
def an_unanswered_end_is_sent_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(token_outbox.TokenOutbox, "repeat_end", lambda self, run, now_s, every_s: False)


@guard
def a_lapsed_worker_asks_its_judges(patch: pytest.MonkeyPatch) -> None:
    def recheck(self: Lapses) -> None:
        for run in self._state.runs:
            if run.state is RunState.LAPSED and self._lease.held:
                self._runs.drop(run, how="lapsed")

    patch.setattr(Lapses, "recheck", recheck)


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
    patch.setattr(group_testing, "SHRINK", 1)


@guard
def progress_clears(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobRecord, "clear", lambda self: None)


@guard
def progress_clears_only_well_past_the_crash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clearance, "CLEAR_TOKENS", 0)
    patch.setattr(judge, "clear_after_s", lambda clearances: 0.0)


@guard
def a_dead_engine_starts_nothing(patch: pytest.MonkeyPatch) -> None:
    async def turn_of(self: RunAdmission, run: Run, began_s: float) -> Turn | None:
        while run.state is RunState.WAITING and (turn := self._state.runs.turn(run, overdue=True)) is None:
            await asyncio.sleep(0.1)
        if run.state is not RunState.WAITING:
            return None
        run.claim()
        return turn

    patch.setattr(RunAdmission, "_turn_of", turn_of)
    patch.setattr(WorkerState, "engine_dead", property(lambda self: False, lambda self, value: None), raising=False)


# -- verdicts -----------------------------------------------------------------------------------------------------------------


@guard
def silence_is_no_verdict(patch: pytest.MonkeyPatch) -> None:
    real = SimMessaging.request

    async def request(self: SimMessaging, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        try:
            return await real(self, subject, data, timeout_s=timeout_s)
        except NoResponder:
            control = msgspec.msgpack.decode(data)
            if control["op"] == "check":
                return judge_client.encode(CheckReply(verdicts=["unknown"] * len(control["runs"])))
            kind = ClaimReply if control["op"] == "claim" else RefuseReply
            return judge_client.encode(kind(verdict="unknown"))

    patch.setattr(SimMessaging, "request", request)


@guard
def no_verdict_right_after_a_reconnect(patch: pytest.MonkeyPatch) -> None:
    """Where leases outlive a server, as in a cluster; those in memory have the rule of the young bucket as well."""
    add = SimServer.add_bucket
    patch.setattr(SimServer, "add_bucket", lambda server, name, **_: add(server, name, in_memory=False))
    patch.setattr(SimMessaging, "connected_since_s", -1e9)


@guard
def a_verdict_takes_a_fresh_read(patch: pytest.MonkeyPatch) -> None:
    async def gone(self: Members, key: str) -> bool:
        return key not in self._values

    patch.setattr(Members, "gone", gone)


@guard
def a_verdict_covers_only_what_was_there_when_it_was_asked(patch: pytest.MonkeyPatch) -> None:
    async def drop_if_gone(self: GoneJudges, name: str) -> None:
        if await self._members.ingress_gone(name):
            for run in self._state.runs:
                if run.judge == name:
                    self._runs.drop(run, how="judge_gone")

    patch.setattr(GoneJudges, "_drop_if_gone", drop_if_gone)


@guard
def nobody_works_for_a_judge_that_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GoneJudges, "tick", lambda self, now_s: None)


@guard
def work_of_the_dead_is_moved(patch: pytest.MonkeyPatch) -> None:
    async def idle(self: Janitor) -> None:
        return None

    patch.setattr(Janitor, "_round", idle)


# -- the judge ----------------------------------------------------------------------------------------------------------------


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
    patch.setattr(Resubmitter, "on_gained", lambda self: None)


@guard
def submitted_again_means_a_new_generation(patch: pytest.MonkeyPatch) -> None:
    def on_lapse(self: Judge) -> list[tuple[JobRecord, int]]:
        return [(record, record.attempt) for record in self._open.values()]

    patch.setattr(Judge, "on_lapse", on_lapse)


# -- counting crashes ---------------------------------------------------------------------------------------------------------


@guard
def suspicions_are_not_crashes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(job_record, "counted", lambda history, held, accounted: list(history))


@guard
def who_is_back_has_not_crashed(patch: pytest.MonkeyPatch) -> None:
    real = job_record.counted
    patch.setattr(job_record, "counted", lambda history, held, accounted: real(history, held, lambda worker: False))


@guard
def who_drains_has_not_crashed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(claims, "drained_key", lambda worker: f"nothing.{worker}")


@guard
def the_death_of_an_engine_counts(patch: pytest.MonkeyPatch) -> None:
    real = job_record.counted

    def processes_only(history: Any, held: Any, accounted: Any) -> list[HistoryEntry]:
        return real([entry for entry in history if "#" not in entry.worker], held, accounted)

    patch.setattr(job_record, "counted", processes_only)


@guard
def a_started_event_is_evidence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Judge, "on_event", lambda self, event: None)


@guard
def crashes_end_a_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(judge, "is_poison", lambda crashes: False)
