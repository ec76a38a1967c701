"""A worker that was taken over, with a login of its own, at a real nats-server: it speaks for no other worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.jetstream import wire
from headrace.jetstream.api import ApiError
from headrace.jetstream.errors import AccessDenied
from headrace.jetstream.logins.roles import Login
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import work_consumer
from tests.support.guarded_server import Guarded, guarded_server

S = Subjects("hr")
OWN, OTHER = "pool-a", "pool-b"
STOLEN, BESIDE = Login("worker", OWN, "w1"), Login("worker", OWN, "w2")
LOGINS = [Login("operator"), Login("ingress"), Login("router"), STOLEN, BESIDE, Login("worker", OTHER, "w9")]

WRITES = {
    "an answer without a sender": S.out("i1"),
    "an answer of a worker beside it": S.spoken_by(OWN, "w2").out("i1"),
    "an answer of another pool": S.spoken_by(OTHER, "w1").out("i1"),
    "a claim without a sender": S.judge("i1"),
    "a claim of a worker beside it": S.spoken_by(OWN, "w2").judge("i1"),
    "a claim of another pool": S.spoken_by(OTHER, "w9").judge("i1"),
    "the word of a judge to a worker beside it": S.own_control("w2"),
    "the word of a judge to a worker of another pool": S.own_control("w9"),
    "a question to a worker of another pool": S.peer(OTHER, "w9"),
    "a command": S.operate_worker(OWN, "w2"),
    "the load of a worker beside it": S.load(OWN, "w2"),
    "cache events of a worker beside it": S.kv(OWN, "w2"),
    "cache events of its rank": S.kv(OWN, "w2~0"),
    "the lease of a worker beside it": f"$KV.hr_members.{S.worker_key(OWN, 'w2')}",
    "the lease of a worker that is not there": f"$KV.hr_members.{S.worker_key(OWN, 'w3')}",
    "the lease of a worker of another pool": f"$KV.hr_members.{S.worker_key(OTHER, 'w9')}",
    "the lease of an ingress": "$KV.hr_members.ingress.i1",
    "the drain of a worker beside it": "$KV.hr_state.drained.w2",
    "a prefill job of another pool": S.prefill(OTHER),
    "the steward as a worker beside it": BESIDE.steward("hr"),
    "the steward as all workers of the pool": Login("worker", OWN).steward("hr"),
}
HEARS = {
    "what judges say to a worker beside it": S.own_control("w2"),
    "what judges say to all": "hr.ctl.*",
    "what is asked of a worker beside it": S.peer(OWN, "w2"),
    "what is asked of another pool": S.peer(OTHER, "w9"),
    "replies to a worker beside it": f"{BESIDE.inbox}.>",
    "replies to all workers of the pool": f"{Login('worker', OWN).inbox}.>",
    "commands to a worker beside it": S.operate_worker(OWN, "w2"),
    "answers": S.spoken_by(OWN, "w2").out("i1"),
    "claims": "hr.judge.>",
}


@pytest_asyncio.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded_server(tmp_path, LOGINS) as server:
        yield server


async def test_it_writes_nothing_in_the_name_of_another(guarded: Guarded) -> None:
    async with await guarded.as_(STOLEN) as worker:
        refused: set[str] = set()
        worker.core.on_permission_error = refused.add
        for subject in WRITES.values():
            worker.send(subject, b"{}")
        await worker.barrier()
    assert refused == {f'permissions violation for publish to "{subject.lower()}"' for subject in WRITES.values()}


async def test_it_hears_nothing_that_is_said_to_another(guarded: Guarded) -> None:
    heard: list[Message] = []
    async with await guarded.as_(STOLEN) as worker:
        refused: set[str] = set()
        worker.core.on_permission_error = refused.add
        for subject in HEARS.values():
            await worker.subscribe(subject, heard.append)
        await worker.barrier()
    assert refused == {f'permissions violation for subscription to "{subject.lower()}"' for subject in HEARS.values()}


async def test_it_speaks_for_itself(guarded: Guarded) -> None:
    own = S.spoken_by(OWN, "w1")
    allowed = [own.out("i1"), own.judge("i1"), own.load(OWN, "w1"), own.kv(OWN, "w1"), own.kv(OWN, "w1~3"), own.peer(OWN, "w2")]
    async with await guarded.as_(STOLEN) as worker:
        refused: set[str] = set()
        worker.core.on_permission_error = refused.add
        await worker.bucket("hr_members").put(S.worker_key(OWN, "w1"), b"alive")
        for subject in allowed:
            worker.send(subject, b"{}")
        await worker.ensure_consumer(work_consumer(S, OWN, "w1", "0123"))
        await worker.barrier()
    assert not refused


async def test_it_cannot_read_or_take_what_is_placed_on_a_worker_that_lives(guarded: Guarded) -> None:
    operator = guarded.operator
    async with await guarded.as_(STOLEN) as worker, await guarded.as_(BESIDE) as beside:
        await beside.bucket("hr_members").put(S.worker_key(OWN, "w2"), b"alive")
        await beside.ensure_consumer(work_consumer(S, OWN, "w2", "5ec4e7"))
        await worker.ensure_consumer(work_consumer(S, OWN, "w1", "0123"))
        theirs = (await operator.publish(S.work(OWN, "w2"), b"a prompt")).seq
        attempts = (
            ("STREAM.MSG.GET.HR_WORK", {"seq": theirs}),
            ("STREAM.MSG.GET.HR_WORK", {"seq": 1, "next_by_subj": S.work(OWN, "w2")}),
            ("STREAM.MSG.DELETE.HR_WORK", {"seq": theirs}),
            ("CONSUMER.DELETE.HR_WORK.W_w2~5ec4e7", None),
        )
        for call, body in attempts:
            with pytest.raises(ApiError, match="10903"):
                await worker.api.call(call, body)
        with pytest.raises(Exception, match="10903"):
            await worker.ensure_consumer(work_consumer(S, OWN, "w2", "mine"))
        assert set(await worker.consumer_subjects("HR_WORK")) == {"W_w1~0123"}

        await beside.bucket("hr_members").delete(S.worker_key(OWN, "w2"))  # it is dead: its work is taken over
        assert [message.data for message in await worker.subject_messages("HR_WORK", S.work(OWN, "w2"))] == [b"a prompt"]
        assert await worker.delete_message("HR_WORK", theirs)
        await worker.delete_consumer("HR_WORK", "W_w2~5ec4e7")
    assert set(await operator.consumer_subjects("HR_WORK")) == {"W_w1~0123"}


async def test_it_cannot_have_its_questions_answered_to_another(guarded: Guarded) -> None:
    """An inbox of a worker beside it is one that a worker may answer at, so a reply there reaches that worker and no queue."""
    replies: list[str] = []
    async with await guarded.as_(Login("ingress")) as ingress, await guarded.as_(STOLEN) as worker:
        await ingress.subscribe(S.from_workers(S.judge("i1")), lambda message: replies.append(message.reply))
        await ingress.barrier()
        for reply in (f"$KV.hr_members.{S.worker_key(OWN, 'w2')}", S.own_control("w2"), f"{STOLEN.inbox}.x"):
            worker.core.send_now(wire.pub(S.spoken_by(OWN, "w1").judge("i1"), b"", reply))
        await worker.barrier()
        await asyncio.sleep(0.2)
    assert replies == ["", "", f"{STOLEN.inbox}.x"]


async def test_its_steward_is_its_own(guarded: Guarded) -> None:
    async with await guarded.as_(STOLEN) as worker:
        for other in (BESIDE, Login("worker", OWN), Login("worker", OTHER, "w9"), Login("router"), Login("operator")):
            with pytest.raises(AccessDenied):
                await worker.request(other.steward("hr"), b"{}", timeout_s=1.0)
