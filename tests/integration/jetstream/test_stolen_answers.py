"""A process that was taken over, with any login: answers sent where it may not publish, and answers in another's name.

The table H1 of the audit, for every role, every call that the role may make, and every subject that it may not publish to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from headrace.broker.codec import decode_ingress_control, decode_worker_control
from headrace.broker.errors import WireError
from headrace.jetstream import wire
from headrace.jetstream.api import ApiError
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError, RequestTimeout
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.logins.roles import PARTS_API, Login, permissions
from headrace.jetstream.ports import Change, Message
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import Topology, work_consumer
from tests.support.guarded_server import Guarded, guarded_server
from tests.support.subject_patterns import allowed, core_subjects, stored_subjects

S = Subjects("hr")
TOPOLOGY = Topology(S)
OWN, OTHER = "pool-a", "pool-b"
STOLEN = [
    Login("ingress"),
    Login("router"),
    Login("worker", OWN),
    Login("worker", OWN, "w1"),
    Login("planner"),
    Login("console"),
    Login("batch", "acme"),
]
VICTIMS = [Login("operator"), Login("worker", OTHER, "w9"), Login("router", OTHER)]
CHOSEN = b"\x81\xa5forged\xc3"  # bytes of the sender's choice; those of the server's own answers begin with a brace
EVIL = msgspec.json.encode({"name": "EVIL", "subjects": ["evil.>"]})

by_login = pytest.mark.parametrize("login", STOLEN, ids=lambda login: login.name)


@pytest_asyncio.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded_server(tmp_path, [*STOLEN, *VICTIMS]) as server:
        yield server


def calls_of(login: Login) -> list[str]:
    """Return a subject of each thing that the login may publish to and the server answers: calls, acks and what is stored."""
    mine = [one for one in permissions(TOPOLOGY, login).publish if not one.startswith(("_INBOX", "hr.steward"))]
    return [one.replace("*", "w1").replace(">", "w1") for one in mine]


def beyond(login: Login) -> list[str]:
    """Return the subjects of streams that the login may not publish to, in its own pool and tenant and in others."""
    subjects = {
        *(one for pool in (OWN, OTHER) for tenant in ("acme", "rival") for one in core_subjects(TOPOLOGY, pool, tenant)),
        *(one for pool in (OWN, OTHER) for one in stored_subjects(TOPOLOGY, pool)),
    }
    mine = permissions(TOPOLOGY, login).publish
    return sorted(one for one in subjects if not allowed(mine, one))


async def ask_all(part: Connection, targets: list[str], login: Login) -> int:
    """Make every call that the login may make, with each of these reply subjects. Returns the number of questions."""
    asked = 0
    for call in calls_of(login):
        stream = call.rpartition(".")[2] if call.startswith(PARTS_API) else ""
        if "PURGE" in call or "MSG.DELETE" in call:
            body = b'{"seq": 999999999, "filter": "none"}'
        elif "MSG.NEXT" in call:
            body = msgspec.json.encode({"batch": 1, "expires": 10**8})
        else:
            body = b'{"seq": 1}' if stream else CHOSEN
        for target in targets:
            part.core.send_now(wire.pub(call, body, target))
            asked += 1
        await part.barrier(10.0)
    return asked


@by_login
async def test_no_answer_of_the_server_is_stored_where_its_asker_may_not_publish(guarded: Guarded, login: Login) -> None:
    operator = guarded.operator
    await operator.publish(S.req(OTHER, "std"), b"a prompt")
    for spec in TOPOLOGY.all_streams():
        if spec.name.startswith("OBJ_"):  # bytes that a reader would store
            await operator.publish(spec.subjects[1].replace(">", "first"), EVIL)
    targets = beyond(login)
    orders = [
        f"{api}.{call}"
        for api in (PARTS_API, "$JS.API")
        for call in (
            "STREAM.PURGE.HR_REQ",
            "STREAM.CREATE.EVIL",
            "STREAM.DELETE.HR_REQ",
            "CONSUMER.CREATE.HR_REQ.evil.hr.req.>",
        )
    ]
    counts = {spec.name: await operator.subject_counts(spec.name, ">") for spec in TOPOLOGY.all_streams() if not spec.on_demand}
    async with await guarded.as_(login) as part:
        asked = await ask_all(part, [*targets, *orders], login)
        for target in [*targets, *orders]:  # and the path of a message of its own told there
            told = wire.encode_headers({"Nats-Trace-Dest": target})
            part.core.send_now(wire.hpub(calls_of(login)[-1], CHOSEN, told))
        await part.barrier(10.0)
    await asyncio.sleep(0.3)
    assert asked > 300, "there is something to ask"
    for stream, before in counts.items():
        after = await operator.subject_counts(stream, ">")
        assert {subject: after.get(subject) for subject in targets if after.get(subject) != before.get(subject)} == {}, stream
    assert (await operator.stream_state("HR_REQ")).messages >= 1
    with pytest.raises(ApiError, match="10059"):
        await operator.api.call("STREAM.INFO.EVIL")


@by_login
async def test_no_answer_of_the_server_is_heard_as_a_message_of_a_process(guarded: Guarded, login: Login) -> None:
    """Where it arrives at all it is the server's own text, which no part reads as a message."""
    heard: list[Message] = []
    w9, router = Login("worker", OTHER, "w9"), Login("router", OTHER)
    named = S.spoken_by(OTHER, "w9")
    ears = {
        w9: [S.own_control("w9"), S.peer(OTHER, "w9"), S.operate_worker(OTHER, "w9"), S.find(OTHER), S.cancel(OTHER)],
        router: [S.load(OTHER, "w9"), S.events(OTHER), S.cancel(OTHER), S.own_control("r1")],
        Login("ingress"): [named.out("i1"), named.judge("i1"), S.quota_open(), S.events(OTHER), S.cancel_jobs(), S.audit()],
    }
    mine = permissions(TOPOLOGY, login).publish
    async with contextlib.AsyncExitStack() as stack:
        targets = []
        for victim, subjects in ears.items():
            if victim.role == login.role and victim.scope in ("", login.scope):
                continue
            connection = await stack.enter_async_context(await guarded.as_(victim))
            for subject in subjects:
                if not allowed(mine, subject):
                    await connection.subscribe(subject, heard.append)
                    targets.append(subject)
            await connection.barrier()
        part = await stack.enter_async_context(await guarded.as_(login))
        if login.role == "worker":
            await part.ensure_consumer(work_consumer(S, OWN, "w1"))
            for _ in range(60):
                await part.publish(S.work(OWN, "w1"), CHOSEN)
            await part.publish("$O.hr_models.M.evil", CHOSEN)
            for target in targets:
                for call, query in (("DIRECT.GET.OBJ_hr_models", {"seq": 1}), ("CONSUMER.MSG.NEXT.HR_WORK.W_w1", {"batch": 1})):
                    part.core.send_now(wire.pub(f"{PARTS_API}.{call}", msgspec.json.encode(query), target))
        assert await ask_all(part, targets, login)
        await asyncio.sleep(0.3)
    assert targets
    for message in heard:
        assert CHOSEN not in message.data, message
        for decode in (decode_ingress_control, decode_worker_control):
            with pytest.raises(WireError):
                decode(message.data)


@by_login
async def test_no_role_is_given_a_consumer_that_pushes(guarded: Guarded, login: Login) -> None:
    """As an ingress did of its own lease, in order to speak to a worker."""
    wanted = permissions(TOPOLOGY, login).consumers
    async with await guarded.as_(login) as part:
        for call in wanted:
            name = call.replace("*", "w1")
            stream, consumer, pattern = name.removeprefix("CONSUMER.CREATE.").split(".", 2)
            config = {"name": consumer, "filter_subject": pattern, "ack_policy": "none", "deliver_subject": S.own_control("w9")}
            with pytest.raises(JetStreamError, match="10903"):
                await part.api.call(name, {"stream_name": stream, "config": config})
    assert bool(wanted) == (login.role != "batch")


async def test_who_is_asked_cannot_answer_another_question(guarded: Guarded) -> None:
    """A router that asks a worker shows it an inbox: not the one at which the server answers, nor that of the next question."""
    shown: list[str] = []
    async with await guarded.as_(Login("router")) as router, await guarded.as_(Login("worker", OWN, "w1")) as worker:
        await worker.subscribe(S.own_control("w1"), lambda message: shown.append(message.reply))
        await guarded.operator.subscribe(S.own_control("silent"), lambda _message: None)
        await worker.barrier()
        await guarded.operator.barrier()
        for _ in range(2):
            with pytest.raises(RequestTimeout):
                await router.request(S.control("w1"), b"", timeout_s=0.2)
        assert len(set(shown)) == 2

        async def forge() -> None:
            known = shown[0].split(".")
            prefixes = {".".join(known[:end]) for end in range(3, len(known))}
            while True:
                for prefix in prefixes:
                    for way in ("", ".a", ".q"):
                        for number in range(1, 60):
                            worker.send(f"{prefix}{way}.{number}", b'{"forged": true}')
                await worker.barrier()

        forging = asyncio.create_task(forge())
        try:
            with pytest.raises(RequestTimeout):  # another process, which says nothing
                await router.request(S.control("silent"), b"", timeout_s=0.7)
            with pytest.raises(RequestTimeout):  # as a call of the server is made
                await router.api._caller.request(S.control("silent"), b"", timeout_s=0.7)
            await router.api.call("INFO")
        finally:
            forging.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await forging


def after_next(first: str, second: str) -> str:
    """Return the id that comes after two of a NUID, which counts in steps of one size behind a prefix that stays."""
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

    def number(text: str) -> int:
        found = 0
        for one in text[-10:]:
            found = found * 62 + digits.index(one)
        return found

    following, text = 2 * number(second) - number(first), ""
    for _ in range(10):
        following, at = divmod(following, 62)
        text = digits[at] + text
    return second[:-10] + text


async def test_the_id_of_a_write_cannot_be_guessed_and_taken(guarded: Guarded) -> None:
    """The server counts ids for all writers of a stream: of a renewal whose id was there before it would store nothing."""
    key, operator = S.worker_key(OTHER, "w9"), guarded.operator
    async with await guarded.as_(Login("worker", OWN, "w1")) as worker, await guarded.as_(VICTIMS[1]) as victim:
        ids = []
        for value in (b"1", b"2"):
            await victim.bucket("hr_members").put(key, value)
            (seen,) = await worker.last_messages("KV_hr_members", [f"$KV.hr_members.{key}"])
            ids.append((seen.headers or {})["Nats-Msg-Id"])
        mine = f"$KV.hr_members.{S.worker_key(OWN, 'w1')}"
        await worker.publish(mine, b"", msg_id=after_next(*ids))
        await victim.bucket("hr_members").put(key, b"3")
    entry = await operator.bucket("hr_members").get(key)
    assert entry is not None
    assert entry.value == b"3"


@by_login
async def test_no_header_of_a_write_removes_what_others_have_stored_in_a_queue(guarded: Guarded, login: Login) -> None:
    """With `Nats-Rollup: all` the server would make one message all that a stream has, and with an id of another's drop it."""
    operator = guarded.operator
    for subject in (S.job("m", "rival"), S.req(OTHER, "std"), S.req(OTHER, "re"), S.work(OTHER, "w9"), S.prefill(OTHER)):
        await operator.publish(subject, b"another's")
    for subject in (S.result("rival", "j1"), S.rsp("rival", "j1"), S.kv(OTHER, "w9"), S.dlq(OTHER)):
        await operator.publish(subject, b"another's")
    queues = [spec.name for spec in TOPOLOGY.streams() if not spec.on_demand]
    before = {name: set(await operator.subject_counts(name, ">")) for name in queues}
    assert sum(map(len, before.values())) == 9
    async with await guarded.as_(login) as part:
        for subject in calls_of(login):
            if subject.startswith("hr.") and not subject.startswith(("hr.load.", "hr.route.")):  # these two are not confirmed
                with contextlib.suppress(JetStreamError):
                    await part.publish(subject, b"x", headers={"Nats-Rollup": "all"}, timeout_s=0.3)
    for name in queues:
        assert before[name] <= set(await operator.subject_counts(name, ">")), name


async def test_a_worker_that_removes_all_leases_is_named_and_no_lease_is_lost(guarded: Guarded) -> None:
    """The server takes that header for a bucket whose keys it tells the ends of, so it cannot be refused."""
    lost: list[bool] = []
    seen: asyncio.Queue[Change] = asyncio.Queue()
    key = S.worker_key(OTHER, "w9")
    async with await guarded.as_(Login("worker", OWN, "w1")) as stolen, await guarded.as_(VICTIMS[1]) as victim:
        lease = LeaseKeeper(victim, "hr_members", key, b"alive", ttl_s=1.5, on_change=lost.append)
        watch = guarded.operator.bucket("hr_members").watch(seen.put_nowait)
        async with asyncio.timeout(20), TaskScope() as tasks:
            running = [tasks.spawn(lease.run()), tasks.spawn(watch.run())]
            await lease.wait_held(5.0)
            await watch.ready(5.0)
            with capture_logs() as logs:
                mine = f"$KV.hr_members.{S.worker_key(OWN, 'w1')}"
                await stolen.publish(mine, b"x", headers={"Nats-Rollup": "all"})
                while await guarded.operator.bucket("hr_members").get(key) is None:
                    await asyncio.sleep(0.02)
                while not (named := [one for one in logs if one["event"] == "bucket.others_removed"]):
                    await asyncio.sleep(0.02)
            for task in running:
                task.cancel()
    assert lost == [True], "gained once, and never lost"
    assert {one["key"] for one in named} == {S.worker_key(OWN, "w1")}
    assert not [change for change in seen._queue if change.value is None]  # type: ignore[attr-defined]
