"""A worker that was taken over, with the login of its pool, at a real nats-server: what it reaches of another pool's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.jetstream import wire
from headrace.jetstream.api import ApiError
from headrace.jetstream.client import ConnectOptions
from headrace.jetstream.errors import AccessDenied
from headrace.jetstream.logins.roles import PARTS_API, Login
from headrace.jetstream.ports import Delivery, Message
from headrace.jetstream.provision import ensure_on_demand
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import POOL_STORES, Topology, prefill_consumer, request_consumer, work_consumer
from tests.support.guarded_server import Guarded, guarded_server

S = Subjects("hr")
TOPOLOGY = Topology(S)
OWN, OTHER = "pool-a", "pool-b"


@pytest_asyncio.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded_server(tmp_path, [Login("operator"), Login("worker", OWN), Login("worker", OTHER)]) as server:
        yield server


async def test_requests_of_another_pool_cannot_be_pulled_or_read(guarded: Guarded) -> None:
    operator = guarded.operator
    await operator.publish(S.req(OTHER, "std"), b"a prompt")
    await operator.ensure_consumer(request_consumer(S, OTHER, "std"))
    async with await guarded.as_(Login("worker", OWN)) as worker:
        refused: set[str] = set()
        worker.core.on_permission_error = refused.add
        got: list[Message] = []
        await worker.subscribe(f"{worker.inbox}.x", got.append)
        for call in (
            f"CONSUMER.MSG.NEXT.HR_REQ.{S.req_consumer(OTHER, 'std')}",
            "STREAM.MSG.GET.HR_REQ",
            "DIRECT.GET.HR_REQ",
            "STREAM.MSG.DELETE.HR_REQ",
            "STREAM.MSG.GET.HR_WORK",
            "DIRECT.GET.HR_WORK",
            "STREAM.MSG.DELETE.HR_WORK",
            "STREAM.MSG.DELETE.HR_PREFILL",
            "CONSUMER.LIST.HR_WORK",
            "CONSUMER.NAMES.HR_WORK",
            "CONSUMER.DELETE.HR_WORK.W_w9",
            "STREAM.MSG.GET.HR_DLQ",
            "STREAM.MSG.GET.HR_JOB",
            "DIRECT.GET.HR_RESULT",
            "STREAM.MSG.GET.OBJ_hr_responses",
            "DIRECT.GET.OBJ_hr_files",
            "STREAM.MSG.GET.KV_hr_keys",
        ):
            worker.core.send_now(wire.pub(f"{PARTS_API}.{call}", b'{"seq":1}', f"{worker.inbox}.x"))
        for subject in (S.req_filter_all(OTHER), S.out("i1"), S.find(OTHER), S.cancel(OTHER), "$KV.hr_members.>"):
            await worker.subscribe(subject, got.append)
        await worker.barrier()
        await asyncio.sleep(0.2)
        assert not got
        assert len(refused) == 22


async def test_placed_requests_of_another_pool_cannot_be_read_deleted_or_pulled_by_the_steward(guarded: Guarded) -> None:
    operator = guarded.operator
    async with await guarded.as_(Login("worker", OTHER)) as other, await guarded.as_(Login("worker", OWN)) as worker:
        await other.ensure_consumer(work_consumer(S, OTHER, "w9", "5ec4e7"))
        await worker.ensure_consumer(work_consumer(S, OWN, "w1", "0123"))
        theirs = (await operator.publish(S.work(OTHER, "w9"), b"a prompt")).seq
        for call, body in (
            ("STREAM.MSG.GET.HR_WORK", {"seq": theirs}),
            ("STREAM.MSG.GET.HR_WORK", {"seq": 1, "next_by_subj": S.work(OTHER, "w9")}),
            ("STREAM.MSG.GET.HR_WORK", {"seq": 1, "next_by_subj": ">"}),
            ("STREAM.MSG.DELETE.HR_WORK", {"seq": theirs, "no_erase": True}),
            ("CONSUMER.DELETE.HR_WORK.W_w9~5ec4e7", None),
        ):
            with pytest.raises(ApiError, match="10903"):
                await worker.api.call(call, body)
        assert await worker.consumer_subjects("HR_WORK") == {"W_w1~0123": (S.work(OWN, "w1"),)}
        got: list[Delivery] = []
        pulled = [worker.pull("HR_WORK", f"W_w9{end}", got.append, credit=1) for end in ("", "~", "~*", "~0123")]
        async with TaskScope() as tasks:
            running = [tasks.spawn(pull.run()) for pull in pulled]
            await asyncio.sleep(0.5)
            for task in running:
                task.cancel()
        assert not got
        assert (await operator.stream_state("HR_WORK")).messages == 1
        assert "W_w9~5ec4e7" in await operator.consumer_subjects("HR_WORK")


@pytest.mark.parametrize("size", [10, 900_000])  # the larger is, in the server's base64, more than a message holds
async def test_work_of_the_own_pool_is_taken_over_through_the_steward(guarded: Guarded, size: int) -> None:
    operator = guarded.operator
    async with await guarded.as_(Login("worker", OWN)) as worker:
        await worker.ensure_consumer(work_consumer(S, OWN, "w1", "0123"))
        bodies = [b"%d" % number + b"x" * size for number in range(3)]
        for body in bodies:
            await operator.publish(S.work(OTHER, "w9"), b"between")
            await operator.publish(S.work(OWN, "w1"), body, headers={"Hr-Attempt": "2"})
        found = await worker.subject_messages("HR_WORK", S.work(OWN, "w1"))
        assert [(message.data, message.headers) for message in found] == [(body, {"Hr-Attempt": "2"}) for body in bodies]
        assert await worker.delete_message("HR_WORK", found[0].seq)
        assert not await worker.delete_message("HR_WORK", found[0].seq)
        await worker.delete_consumer("HR_WORK", "W_w1~0123")
        await worker.delete_consumer("HR_WORK", "W_w1~0123")  # it is gone, and that is fine
    assert (await operator.stream_state("HR_WORK")).messages == 5
    assert await operator.consumer_subjects("HR_WORK") == {}


async def test_a_worker_pulls_no_prefill_jobs_of_another_pool(guarded: Guarded) -> None:
    """They have the prompts. The server lets a login pull by a name; it knows none but those of its own pool."""
    operator = guarded.operator
    secret = {
        pool: ConnectOptions.from_context(str(guarded.folder / f"worker-{pool}.json")).secret_of(pool) for pool in (OWN, OTHER)
    }
    assert len(set(secret.values())) == 2
    assert all(len(one) == 32 for one in secret.values())
    shared, own = (prefill_consumer(S, OTHER, who, secret[OTHER]) for who in (None, "w9"))
    got: list[Delivery] = []
    async with await guarded.as_(Login("worker", OTHER)) as victim, await guarded.as_(Login("worker", OWN)) as thief:
        for spec in (shared, own):
            await victim.ensure_consumer(spec)
        jobs = [(await operator.publish(S.prefill(OTHER, who), b"a prompt")).seq for who in (None, "w9")]
        assert await thief.consumer_subjects("HR_PREFILL") == {}
        guesses = [f"{name}{end}" for name in (f"P_{OTHER}", "P_w9_own") for end in ("", "~", "~*", f"~{secret[OWN]}")]
        pulled = [thief.pull("HR_PREFILL", name, got.append, credit=1) for name in guesses]
        async with TaskScope() as tasks:
            running = [tasks.spawn(one.run()) for one in pulled]
            await asyncio.sleep(0.5)
            for task in running:
                task.cancel()
        with pytest.raises(ApiError, match="10903"):
            await thief.api.call("STREAM.MSG.GET.HR_PREFILL", {"seq": jobs[0]})
        with pytest.raises(Exception, match="10903"):
            await thief.ensure_consumer(prefill_consumer(S, OTHER, None, "mine"))
        assert got == []
        pull = victim.pull("HR_PREFILL", shared.name, got.append, credit=1)
        async with asyncio.timeout(10), TaskScope() as tasks:
            pulling = tasks.spawn(pull.run())
            while not got:
                await asyncio.sleep(0.02)
            pulling.cancel()
    assert [delivery.data for delivery in got] == [b"a prompt"]


@pytest.mark.parametrize("kind", POOL_STORES)
async def test_a_worker_reaches_no_kv_blocks_and_no_embeddings_of_another_pool(guarded: Guarded, kind: str) -> None:
    """What a block or an embedding was made of can be told from it, and a wrong one would be computed on."""
    name = S.pool_bucket(kind, OTHER)
    stream = f"OBJ_{name}"
    async with await guarded.as_(Login("worker", OTHER)) as victim, await guarded.as_(Login("worker", OWN)) as thief:
        spec = TOPOLOGY.pool_store(stream)
        assert spec is not None
        await ensure_on_demand(victim, spec)
        await victim.objects(name).put("ns/a", b"block")
        assert await victim.objects(name).get("ns/a") == b"block"
        before = (await guarded.operator.stream_state(stream)).messages
        refused: set[str] = set()
        thief.core.on_permission_error = refused.add
        tried = [
            f"{PARTS_API}.{call}.{stream}" for call in ("DIRECT.GET", "STREAM.MSG.GET", "STREAM.PURGE", "STREAM.MSG.DELETE")
        ]
        tried += [f"{PARTS_API}.DIRECT.GET.{stream}.$O.{name}.C.x", f"$O.{name}.C.x", f"$O.{name}.M.x"]
        for subject in tried:
            thief.send(subject, b'{"seq": 1}')
        await thief.barrier()
        assert len(refused) == len(tried)
        async with await guarded.as_(Login("worker", OWN)) as again:
            for reached in (again.objects(name).get("ns/a"), again.objects(name).put("ns/a", b"another")):
                with pytest.raises(AccessDenied):
                    await reached
        assert (await guarded.operator.stream_state(stream)).messages == before
        assert await victim.objects(name).get("ns/a") == b"block"
