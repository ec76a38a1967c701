"""How many jobs a prefill worker asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker import prefill_server
from headrace.broker.membership.members import Members
from headrace.broker.messages.prefill import PrefillDone, PrefillJob
from headrace.broker.prefill_server import MOST_CREDIT, TRANSITIONS, HeldPrefill, HeldState, PrefillServer, TokenBudget
from headrace.broker.protocol.run import IllegalTransition
from headrace.broker.settings import SessionSettings, Timing
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.errors import NoResponder
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Delivery, Messaging
from headrace.jetstream.subjects import Subjects


def test_tokens_count_and_not_jobs() -> None:
    budget = TokenBudget(1000)
    for n in range(9):
        budget.reserve(f"short-{n}", 100)
    assert budget.credit == 1
    budget.reserve("long", 5000)
    assert budget.credit == 0
    budget.release("long")
    assert budget.credit == 1


def test_a_prompt_larger_than_the_budget_is_asked_for_while_there_is_any_room() -> None:
    budget = TokenBudget(10)
    budget.reserve("huge", 100_000)
    assert budget.credit == 0
    budget.release("huge")
    assert budget.credit == 1


def test_many_are_asked_for_at_once_when_recent_ones_were_small() -> None:
    budget = TokenBudget(1000)
    for n in range(20):
        budget.reserve(str(n), 10)
        budget.release(str(n))
    assert budget.credit == MOST_CREDIT


def test_a_job_that_comes_twice_counts_once() -> None:
    budget = TokenBudget(100)
    budget.reserve("a", 60)
    budget.reserve("a", 60)
    assert budget.used == 60
    budget.release("a")
    budget.release("a")
    assert budget.used == 0


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0"):
        TokenBudget(0)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3000), st.booleans())), st.integers(1, 2000))
def test_what_is_used_is_what_is_held(steps: list[tuple[str, int, bool]], limit: int) -> None:
    budget = TokenBudget(limit)
    held: dict[str, int] = {}
    for job, tokens, comes in steps:
        if comes:
            budget.reserve(job, tokens)
            held[job] = max(tokens, 1)
        else:
            budget.release(job)
            held.pop(job, None)
        assert budget.used == sum(held.values())
        assert (budget.credit == 0) == (budget.used >= limit)
        assert budget.credit <= MOST_CREDIT


JOB = PrefillJob(job="j", id="r", attempt=1, decode="d-1", deadline=60.0, created=0.0, tokens=1, uncached=1)
DONE = PrefillDone(job="j", worker="p-1", params={"engine": "p-1"})

MOVES: dict[str, tuple[Callable[[HeldPrefill], None], HeldState]] = {
    "start": (lambda held: held.start(1.0), HeldState.RUNNING),
    "finish": (lambda held: held.finish(DONE, kept_until_s=2.0), HeldState.TELLING),
    "accept": (lambda held: held.accept(3.0), HeldState.HELD),
    "refuse": (lambda held: held.refuse(DONE), HeldState.TELLING),
    "forget": (HeldPrefill.forget, HeldState.GONE),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("before", HeldState)
def test_each_method_reaches_its_state_or_raises(before: HeldState, name: str) -> None:
    method, after = MOVES[name]
    held = HeldPrefill(JOB, cast("Delivery", None), state=before)
    if after in TRANSITIONS[before]:
        method(held)
        assert held.state is after
    else:
        with pytest.raises(IllegalTransition):
            method(held)
        assert held.state is before


def test_whatever_ends_the_computation_wakes_the_waiter() -> None:
    for name in ("finish", "refuse", "forget"):
        held = HeldPrefill(JOB, cast("Delivery", None))
        MOVES[name][0](held)
        assert held.computed.is_set()


class Nobody:
    """A world in which the decode worker's lease is gone and nobody answers; also the engine and the stored message."""

    lease_s = 100.0
    held = False
    now = 0.0

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.consumers: list[str] = []
        self.acked = 0

    def pull(self, *_others: Any, **_named: Any) -> Nobody:
        return self

    credit = 0

    def add_credit(self, n: int) -> None: ...

    async def ensure_consumer(self, spec: Any) -> None:
        self.consumers.append(f"made {spec.name}")

    async def delete_consumer(self, _stream: str, name: str) -> None:
        self.consumers.append(f"deleted {name}")

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        raise NoResponder(subject)

    def worker_live(self, pool: str, worker: str) -> bool:
        return True

    async def worker_gone(self, pool: str, worker: str) -> bool:
        return True

    def stop(self, job: str) -> None:
        self.stopped.append(job)

    def ack(self) -> None:
        self.acked += 1


def prefill(world: Nobody, **secrets: str) -> tuple[PrefillServer, HeldPrefill]:
    deps = WorkerDeps(
        **secrets,
        messaging=cast("Messaging", world),
        subjects=Subjects("hr"),
        settings=SessionSettings(timing=Timing(retry_s=0.01, ack_wait_s=0.03), prefill_budget_tokens=100),
        wall=lambda: world.now,
    )
    one = PrefillServer(
        deps,
        cast("Members", world),
        cast("LeaseKeeper", world),
        cast("prefill_server.PrefillExecutor", world),
        pool="p",
        worker="p-1",
        may_take=lambda: True,
    )
    held = one._held["j"] = HeldPrefill(JOB, cast("Delivery", world), state=HeldState.RUNNING)
    one.finished(DONE)
    return one, held


@pytest.mark.parametrize("promised", [False, True])
async def test_the_blocks_of_the_dead_are_let_go_of_but_not_what_was_promised_just_now(*, promised: bool) -> None:
    world = Nobody()
    one, held = prefill(world)
    held.accept(0.0)
    if promised:
        assert one.check("j").state == "held"
    one._drop_all_of("d-1")
    assert world.stopped == ([] if promised else ["j"])


async def test_an_answer_that_reaches_nobody_outlives_their_lease_as_long_as_was_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_server, "PROMISED_S", 0.5)
    world = Nobody()
    one, held = prefill(world)
    one.check("j")
    telling = asyncio.create_task(one._ask(held, DONE))
    await asyncio.sleep(0.05)
    assert (world.stopped, held.state) == ([], HeldState.TELLING)
    async with asyncio.timeout(5):
        assert await telling is False
    assert (world.stopped, held.state, len(one)) == (["j"], HeldState.GONE, 0)


@pytest.mark.parametrize("promised", [False, True])
async def test_a_worker_that_leaves_refuses_an_answer_that_is_on_its_way_but_not_what_was_promised_just_now(
    monkeypatch: pytest.MonkeyPatch, *, promised: bool
) -> None:
    """The decode worker may have the answer already, although its confirmation has not come back."""
    monkeypatch.setattr(prefill_server, "PROMISED_S", 0.1)
    world = Nobody()
    one, held = prefill(world)
    if promised:
        one.check("j")
    leaving = asyncio.create_task(one.leave(0.0))
    await asyncio.sleep(0.01)
    assert held.answer is not None
    assert (world.stopped, held.answer.fault is None) == (([], True) if promised else (["j"], False))
    held.accept(0.0)
    async with asyncio.timeout(5):
        await leaving
    assert world.stopped[-1] == "j"


async def test_a_job_that_is_still_computed_past_its_deadline_is_stopped_though_nobody_has_dropped_it() -> None:
    """In a rendezvous its engine may wait for a decode side that never comes. An answer that is on its way is not touched."""
    world = Nobody()
    one, _ = prefill(world)
    late = one._held["late"] = HeldPrefill(msgspec.structs.replace(JOB, job="late"), cast("Delivery", world))
    late.start(0.0)
    tending = asyncio.create_task(one._tend())
    world.now = JOB.deadline
    await asyncio.sleep(0.05)
    assert world.stopped == []
    world.now = JOB.deadline + prefill_server.LATE_S
    async with asyncio.timeout(5):
        await late.computed.wait()
    assert (world.stopped, late.state, list(one._held)) == (["late"], HeldState.GONE, ["j"])
    tending.cancel()
    await asyncio.wait([tending])


@pytest.mark.parametrize(
    ("secrets", "done"),
    [
        ({}, ["made P_p-1_own", "made P_p", "deleted P_p-1_own"]),
        (
            {"secret": "own", "pool_secret": "all"},
            ["deleted P_p", "made P_p-1_own~own", "made P_p~all", "deleted P_p-1_own~own"],
        ),
    ],
    ids=["without-logins", "with-logins"],
)
async def test_with_logins_no_consumer_has_a_name_that_can_be_guessed(secrets: dict[str, str], done: list[str]) -> None:
    """One that has is deleted: the stream takes no other one with its filter, and who guesses its name could pull from it."""
    world = Nobody()
    one, _ = prefill(world, **secrets)
    await one.ensure_consumers()
    await one.forget_consumer()
    assert world.consumers == done
