"""Each rule of hand-overs matters: without it the search finds a broken promise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.broker import prefill_server
from headrace.broker.messages.prefill import PrefillDone, PrefillState, PrefillTaken, PrefillVerdict
from headrace.broker.prefill_client import Asked, PrefillClient
from headrace.broker.prefill_server import PrefillServer
from headrace.broker.worker.runs import WorkerRuns
from headrace.broker.worker.service import Service
from headrace.workers.runtime.decode_side import RemotePrefillRun
from headrace.workers.runtime.runs import Runs
from tests.simulation.guard_search import Report, assert_matters
from tests.simulation.prefill.test_prefill import SCENARIOS

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

Guard = Callable[[pytest.MonkeyPatch], None]


def parameters_are_confirmed_before_they_are_used(patch: pytest.MonkeyPatch) -> None:
    async def confirm(self: PrefillClient, job: str, *, least_s: float) -> float:
        return 1000.0

    patch.setattr(PrefillClient, "confirm", confirm)


def a_prefill_worker_is_probed(patch: pytest.MonkeyPatch) -> None:
    async def ask(self: PrefillClient, asked: Asked) -> PrefillState:
        return PrefillState(state="held", left_s=1000.0)

    patch.setattr(PrefillClient, "_ask", ask)


def nobody_waits_for_ever_to_be_taken(patch: pytest.MonkeyPatch) -> None:
    async def taken(self: PrefillClient, job: str, *, wait_s: float) -> PrefillTaken:
        return await self._asked[job].taken

    patch.setattr(PrefillClient, "taken", taken)


def nobody_waits_for_ever_for_a_transfer(patch: pytest.MonkeyPatch) -> None:
    async def first_token(self: RemotePrefillRun, came: asyncio.Future[Any]) -> None:
        if await came is not None:
            raise self._transfer_failed(came.result())

    patch.setattr(RemotePrefillRun, "_first_token", first_token)


def a_job_that_nobody_waits_for_is_stale(patch: pytest.MonkeyPatch) -> None:
    def on_done(self: PrefillClient, said: PrefillDone) -> PrefillVerdict:
        self.on_taken(PrefillTaken(job=said.job, worker=said.worker))
        if said.job in self._asked and not (done := self._asked[said.job].done).done():
            done.set_result(said)
        return PrefillVerdict(verdict="go")

    patch.setattr(PrefillClient, "on_done", on_done)


def a_drop_that_got_lost_is_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill_server, "ASK_AGAIN_S", 1000.0)


class NobodyDies:
    """What a prefill worker knows of others, but for their deaths."""

    def __init__(self, members: Any) -> None:
        self._members = members

    def __getattr__(self, name: str) -> Any:
        return getattr(self._members, name)

    async def worker_gone(self, pool: str, worker: str) -> bool:
        return False


def the_dead_want_nothing(patch: pytest.MonkeyPatch) -> None:
    make = PrefillServer.__init__

    def init(self: PrefillServer, deps: Any, members: Any, *others: Any, **named: Any) -> None:
        make(self, deps, NobodyDies(members), *others, **named)  # type: ignore[arg-type]

    patch.setattr(PrefillServer, "__init__", init)


def who_leaves_keeps_what_it_has_promised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill_server, "PROMISED_S", 0.0)


def a_promise_outlives_the_lease_of_whom_it_was_made_to(patch: pytest.MonkeyPatch) -> None:
    def drop_all_of(self: PrefillServer, decode_worker: str) -> None:
        for held in [held for held in self._held.values() if held.job.decode == decode_worker]:
            self.drop(held.job.job)

    patch.setattr(PrefillServer, "_drop_all_of", drop_all_of)


def a_stopped_run_gives_its_hand_over_up(patch: pytest.MonkeyPatch) -> None:
    def withdraw(self: Runs, run: Any) -> list[Any]:
        mine = self._sequences.of(run)
        for choice in mine:
            del self._sequences.active[choice.id]
        return mine

    patch.setattr(Runs, "_withdraw", withdraw)


def a_role_changes_only_when_the_engine_is_empty(patch: pytest.MonkeyPatch) -> None:
    async def empty(self: Service, reason: Any, grace_s: float) -> None: ...

    patch.setattr(Service, "_empty", empty)


def what_reaches_a_prefill_worker_goes_elsewhere(patch: pytest.MonkeyPatch) -> None:
    def keep(self: WorkerRuns, delivery: Any) -> None: ...

    patch.setattr(WorkerRuns, "return_unserved", keep)


# In which deployment, and the first seed that shows it: only a saving of time, see `guard_search.py`.
WHERE: dict[Guard, tuple[str, int]] = {
    parameters_are_confirmed_before_they_are_used: ("params", 374),
    a_prefill_worker_is_probed: ("params", 2),
    nobody_waits_for_ever_to_be_taken: ("nobody takes it", 1),
    nobody_waits_for_ever_for_a_transfer: ("params", 10),
    a_job_that_nobody_waits_for_is_stale: ("kept for ever", 35),
    a_drop_that_got_lost_is_noticed: ("kept for ever", 18),
    the_dead_want_nothing: ("kept for ever", 91),
    who_leaves_keeps_what_it_has_promised: ("roles", 585),
    a_promise_outlives_the_lease_of_whom_it_was_made_to: ("slow transfers", 6),
    a_stopped_run_gives_its_hand_over_up: ("roles", 21),
    a_role_changes_only_when_the_engine_is_empty: ("roles", 25),
    what_reaches_a_prefill_worker_goes_elsewhere: ("roles", 486),
}


@pytest.mark.parametrize("guard", WHERE, ids=lambda guard: guard.__name__)
def test_without_it_a_promise_is_broken(guard: Guard, record_property: Report) -> None:
    where, first = WHERE[guard]
    assert_matters(guard, SCENARIOS, where, first, report=record_property)
