"""A process that was taken over, with the login that it holds, at a real nats-server: what it tries and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from headrace.jetstream import wire
from headrace.jetstream.api import ApiError
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import AccessDenied, TopologyError
from headrace.jetstream.logins.roles import PARTS_API, Login
from headrace.jetstream.ports import Change, Delivery, Message
from headrace.jetstream.provision import ensure_on_demand
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import Topology, request_consumer, work_consumer
from tests.support.guarded_server import Guarded, guarded_server

S = Subjects("hr")
TOPOLOGY = Topology(S)
OWN, OTHER = "pool-a", "pool-b"
EVIL = msgspec.json.encode({"name": "EVIL", "subjects": ["evil.>"]})
LOGINS = [Login("operator"), Login("ingress"), Login("router"), Login("console"), Login("batch", "acme")]
LOGINS += [Login("worker", OWN), Login("worker", OTHER)]


@pytest_asyncio.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded_server(tmp_path, LOGINS) as server:
        yield server


async def messages(operator: Connection, stream: str) -> int:
    return (await operator.stream_state(stream)).messages


# What the server does with a reply subject of the sender's choice, through each call that a worker may make.
ASKED = [
    (f"{PARTS_API}.DIRECT.GET.OBJ_hr_models", {"last_by_subj": "$O.hr_models.M.evil"}),
    (f"{PARTS_API}.STREAM.MSG.GET.OBJ_hr_models", {"last_by_subj": "$O.hr_models.M.evil"}),
    (f"{PARTS_API}.CONSUMER.MSG.NEXT.HR_WORK.W_w1", {"batch": 1, "expires": 10**8}),
    (f"{PARTS_API}.INFO", {}),
    ("hr.steward.worker.pool-a", {"call": "STREAM.INFO.HR_REQ"}),
    ("$O.hr_models.M.other", {}),
    ("hr.steward.worker.pool-a", {"call": "", "body": {}}),
]
TARGETS = [
    f"{PARTS_API}.STREAM.PURGE.HR_REQ",
    f"{PARTS_API}.STREAM.CREATE.EVIL",
    f"{PARTS_API}.STREAM.DELETE.HR_REQ",
    "$JS.API.STREAM.PURGE.HR_REQ",
    "$JS.API.STREAM.CREATE.EVIL",
    "$JS.API.STREAM.DELETE.HR_REQ",
    f"$KV.hr_models.{OTHER}",
    f"$KV.hr_members.worker.{OTHER}.w9",
    "$KV.hr_members.ingress.i1",
    "$KV.hr_keys.k1",
    f"hr.req.{OTHER}.std._",
    f"hr.work.{OTHER}.w9",
    "hr.result.acme.j1",
    f"hr.dlq.{OTHER}",
]


async def test_an_answer_of_the_server_is_no_way_around_the_lists(guarded: Guarded) -> None:
    """Each call that a worker may make, with a reply subject that it may not publish to: nothing is stored or changed."""
    operator = guarded.operator
    await operator.publish(S.req(OTHER, "std"), b"a prompt")
    made = [spec.name for spec in TOPOLOGY.all_streams() if not spec.on_demand]
    before = {name: await messages(operator, name) for name in made}
    async with await guarded.as_(Login("worker", OWN)) as worker:
        await worker.ensure_consumer(work_consumer(S, OWN, "w1"))
        await worker.publish("$O.hr_models.M.evil", EVIL)
        for _ in range(40):
            await worker.publish(S.work(OWN, "w1"), EVIL)
        for target in TARGETS:
            for asked, query in ASKED:
                worker.core.send_now(wire.pub(asked, msgspec.json.encode(query), target))
        await worker.barrier()
    await asyncio.sleep(0.5)
    after = {name: await messages(operator, name) for name in made}
    assert after == {**before, "OBJ_hr_models": 1 + len(TARGETS), "HR_WORK": 40}  # its own writes
    with pytest.raises(ApiError, match="10059"):
        await operator.api.call("STREAM.INFO.EVIL")
    assert len(ASKED) * len(TARGETS) == 98


async def test_a_message_of_a_stream_is_not_taken_for_one_of_a_process(guarded: Guarded) -> None:
    """Bytes of a worker's choice arrive where it may not publish, and are dropped there."""
    heard: list[Message] = []
    async with await guarded.as_(Login("ingress")) as ingress, await guarded.as_(Login("worker", OWN)) as worker:
        await ingress.subscribe(S.from_workers(S.out("i1")), heard.append)
        await ingress.subscribe(S.quota_open(), heard.append)
        await ingress.barrier()
        await worker.ensure_consumer(work_consumer(S, OWN, "w1"))
        await worker.publish("$O.hr_models.M.evil", EVIL)
        await worker.publish(S.work(OWN, "w1"), EVIL)
        for asked, query in ASKED[:1] + ASKED[2:3]:
            worker.core.send_now(wire.pub(asked, msgspec.json.encode(query), S.quota_open()))
        worker.send(S.spoken_by(OWN, "w1").out("i1"), b"a frame")
        await worker.barrier()
        await asyncio.sleep(0.3)
    assert [message.data for message in heard] == [b"a frame"]


async def test_a_part_answers_at_inboxes_only(guarded: Guarded) -> None:
    """A question cannot make an ingress write for the asker: its answer goes to an inbox or nowhere."""
    replies: list[str] = []
    async with await guarded.as_(Login("ingress")) as ingress, await guarded.as_(Login("worker", OWN)) as worker:
        await ingress.subscribe(S.from_workers(S.judge("i1")), lambda message: replies.append(message.reply))
        await ingress.barrier()
        for reply in (f"$KV.hr_members.worker.{OTHER}.w9", "hr.cancel.jobs", "_INBOX.worker.pool-a.x"):
            worker.core.send_now(wire.pub(S.spoken_by(OWN, "w1").judge("i1"), b"", reply))
        await worker.barrier()
        await asyncio.sleep(0.2)
    assert replies == ["", "", "_INBOX.worker.pool-a.x"]


@pytest.mark.parametrize("changed", [{"deliver_subject": S.req(OTHER, "std")}, {"filter_subject": S.work(OTHER, "w9")}])
async def test_the_steward_makes_no_consumer_that_delivers_or_reads_elsewhere(
    guarded: Guarded, changed: dict[str, Any]
) -> None:
    spec = work_consumer(S, OWN, "w1")
    async with await guarded.as_(Login("worker", OWN)) as worker:
        config = {"name": spec.name, "filter_subject": S.work(OWN, "w1"), "ack_policy": "explicit", **changed}
        call = f"CONSUMER.CREATE.{spec.stream}.{spec.name}.{S.work(OWN, 'w1')}"
        with pytest.raises(ApiError, match="10903"):
            await worker.api.call(call, {"stream_name": spec.stream, "config": config})
        with pytest.raises(TopologyError, match="10903"):
            await worker.ensure_consumer(work_consumer(S, OTHER, "w9"))
        with pytest.raises(TopologyError, match="10903"):
            await worker.ensure_consumer(request_consumer(S, OTHER, "std"))


async def test_a_worker_cannot_ask_the_steward_in_the_name_of_another(guarded: Guarded) -> None:
    async with await guarded.as_(Login("worker", OWN)) as worker:
        for other in (Login("worker", OTHER), Login("router"), Login("operator")):
            with pytest.raises(AccessDenied):
                await worker.request(other.steward("hr"), b"{}", timeout_s=1.0)


async def test_a_tenant_reads_its_own_results_only(guarded: Guarded) -> None:
    operator = guarded.operator
    for tenant in ("acme", "rival"):
        await operator.publish(S.result(tenant, "j1"), tenant.encode())
    async with await guarded.as_(Login("batch", "acme")) as tenant:
        own = f"{PARTS_API}.DIRECT.GET.HR_RESULT.{S.result('acme', 'j1')}"
        assert await tenant.request(own, b"", timeout_s=2.0) == b"acme"
        for subject in (
            f"{PARTS_API}.DIRECT.GET.HR_RESULT.{S.result('rival', 'j1')}",
            f"{PARTS_API}.DIRECT.GET.HR_RESULT",
            f"{PARTS_API}.STREAM.INFO.HR_RESULT",
            S.job("sim", "rival"),
            S.result("acme", "j2"),
        ):
            with pytest.raises(AccessDenied):
                await tenant.request(subject, b"{}", timeout_s=1.0)
        ack = await tenant.publish(S.job("sim", "acme"), b"{}")
        assert ack.stream == "HR_JOB"


async def test_a_steward_makes_the_store_of_embeddings_as_it_should_be_and_no_other_stream(guarded: Guarded) -> None:
    embeddings = TOPOLOGY.embeddings(OWN)
    async with await guarded.as_(Login("worker", OWN)) as worker, await guarded.as_(Login("ingress")) as ingress:
        for call in ("STREAM.CREATE.EVIL", "STREAM.CREATE.HR_LOAD"):
            with pytest.raises((ApiError, AccessDenied)):
                await worker.api.call(call, {"name": call.rpartition(".")[2], "subjects": ["evil.>"]})
        with pytest.raises((ApiError, AccessDenied)):
            await ingress.api.call(f"STREAM.CREATE.{embeddings.name}", embeddings.config())
        await worker.api.call(f"STREAM.CREATE.{embeddings.name}", {"name": embeddings.name, "subjects": ["hr.req.>"]})
        config = (await guarded.operator.api.call(f"STREAM.INFO.{embeddings.name}"))["config"]
        assert config["subjects"] == list(embeddings.subjects)
        await ensure_on_demand(worker, embeddings)
        await worker.objects(S.pool_bucket("embeddings", OWN)).put("ns/a", b"embedding")
        with pytest.raises((ApiError, AccessDenied)):
            await worker.api.call(f"STREAM.CREATE.{TOPOLOGY.embeddings(OTHER).name}", {})


async def test_a_part_that_was_taken_over_learns_no_names_of_tenants_from_a_streams_description(guarded: Guarded) -> None:
    """`STREAM.INFO` with a filter lists subjects: waiting tenants, their jobs and results, work of other pools."""
    operator = guarded.operator
    for tenant in ("acme", "rival"):
        await operator.publish(S.result(tenant, "j1"), b"")
        await operator.publish(S.req(OTHER, "std", tenant), b"")
    await operator.publish(S.work(OTHER, "w2"), b"")
    await operator.publish(S.work(OWN, "w1"), b"")
    assert set(await operator.subject_counts("HR_RESULT", ">")) == {S.result("acme", "j1"), S.result("rival", "j1")}
    everywhere = [
        (spec.name, pattern) for spec in TOPOLOGY.all_streams() for pattern in (">", "hr.>", "$KV.>", "$O.>", *spec.subjects)
    ]
    for login in (Login("worker", OWN), Login("console")):
        async with await guarded.as_(login) as part:
            for stream, pattern in everywhere:
                if login.role == "console" and pattern.startswith(("hr.req.", "hr.work.", "hr.job.")):
                    continue  # what it shows: the queues
                if login.role == "worker" and stream == "HR_WORK":
                    continue  # names of pools and workers, no tenant's
                with pytest.raises((ApiError, AccessDenied, TopologyError)):
                    await part.subject_counts(stream, pattern)
            with pytest.raises(AccessDenied):
                await part.request(f"{PARTS_API}.STREAM.INFO.HR_RESULT", b'{"subjects_filter": ">"}', timeout_s=1.0)
            assert (await part.stream_state("HR_RESULT")).messages == 2
    async with await guarded.as_(Login("worker", OWN)) as worker:
        assert await worker.subject_counts("HR_WORK", S.work_filter(OWN)) == {S.work(OWN, "w1"): 1}


async def test_an_operator_sees_changes_too(guarded: Guarded) -> None:
    """The server cannot push into the account of the parts, so a watch must pull, although an operator makes its consumer."""
    changes: asyncio.Queue[Change] = asyncio.Queue()
    watch = guarded.operator.bucket("hr_members").watch(changes.put_nowait)
    async with asyncio.timeout(20), TaskScope() as tasks:
        watching = tasks.spawn(watch.run())
        await watch.ready(5.0)
        for number in range(3):
            await guarded.operator.bucket("hr_members").put("worker.p.w1", b"%d" % number)
            assert (await changes.get()).value == b"%d" % number
        watching.cancel()


async def test_parts_work_with_consumers_of_the_steward(guarded: Guarded) -> None:
    """Pulls, acks, watches and follows, in the account of the parts."""
    async with await guarded.as_(Login("worker", OWN)) as worker, await guarded.as_(Login("ingress")) as ingress:
        spec = work_consumer(S, OWN, "w1")
        await worker.ensure_consumer(spec)
        got: asyncio.Queue[Delivery] = asyncio.Queue()
        pull = worker.pull(spec.stream, spec.name, got.put_nowait, credit=4)
        changes: asyncio.Queue[Change] = asyncio.Queue()
        watch = ingress.bucket("hr_members").watch(changes.put_nowait)
        await worker.bucket("hr_members").put(f"worker.{OWN}.w1", b"before")
        async with asyncio.timeout(20), TaskScope() as tasks:
            running = [tasks.spawn(pull.run()), tasks.spawn(watch.run())]
            await watch.ready(5.0)
            await guarded.operator.publish(S.work(OWN, "w1"), b"work")
            delivery = await got.get()
            delivery.ack()
            assert (await changes.get()).value == b"before"
            for number in range(1500):  # more than one request for changes
                await worker.bucket("hr_members").put(f"worker.{OWN}.w1", b"%d" % number)
                assert (await changes.get()).value == b"%d" % number
            await worker.bucket("hr_members").delete(f"worker.{OWN}.w1")
            assert (await changes.get()).kind == "delete"
            follow = ingress.follow("HR_RESULT", "hr.result.acme.*", start_seq=1)
            await ingress.publish(S.result("acme", "j9"), b"done")
            assert [m.data for m in (await follow.next()).messages] == [b"done"]
            await follow.close()
            for task in running:
                task.cancel()
        assert await messages(guarded.operator, "HR_WORK") == 0
