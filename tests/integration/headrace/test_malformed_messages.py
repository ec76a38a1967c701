"""No message ends a part of a deployment: each reader gets rubbish and mutations of all it reads, then answers a request."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest

from headrace.broker.codec import encode, pack_u32
from headrace.broker.messages.events import Cancel
from headrace.broker.messages.requests import Generation, Parsing, Pooling, PoolingInput, Record, Sampling
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects
from tests.support import poison
from tests.support.up_process import RunningUp, routed_up

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(240)]

NAMES = Subjects("hr")
AT_ONCE = 64
MOST = 700  # messages to one stream subject: of more mutations every second, third …

HEADER_VALUES = (
    "",
    "0",
    "-1",
    "9" * 5000,
    "1e400",
    "nan",
    '{"a":' * 5000,
    "[" * 5000,
    "é",
    "[[1,2]]",
    '[[1,"a.b",1]]',
    '{"worker":"a b"}',
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    with routed_up(tmp_path_factory.mktemp("up"), "--workers", "2", "--log-format", "json") as up:
        yield up


class Target:
    """The names of a deployment's parts, and a connection to its server."""

    def __init__(self, connection: Connection, names: dict[str, str]) -> None:
        self.connection = connection
        self.pool = names["pool"]
        self.worker = names["worker"]
        self.router = names["router"]
        self.ingress = names["ingress"]

    async def send_all(self, subject: str, messages: Iterable[bytes]) -> int:
        """Send core messages, with a reply subject that nobody reads, in steps that the server can follow."""
        count = 0
        for data in messages:
            if len(data) < self.connection.max_payload:
                self.connection.send(subject, data, reply=f"_nobody.{count}")
                count += 1
            if count % 200 == 0:
                await self.connection.barrier(10.0)
        await self.connection.barrier(10.0)
        return count

    async def store_all(self, subject: str, messages: Iterable[bytes], headers: dict[str, str] | None = None) -> int:
        """Store messages, `AT_ONCE` at a time; a full queue is fine."""
        pending = iter(messages)
        stored = 0
        while batch := list(islice(pending, AT_ONCE)):
            done = await asyncio.gather(*(self._store(subject, data, headers) for data in batch))
            stored += sum(done)
        return stored

    async def _store(self, subject: str, data: bytes, headers: dict[str, str] | None) -> bool:
        try:
            await self.connection.publish(subject, data, headers=headers, timeout_s=10.0)
        except JetStreamError:
            return False
        return True


async def on_target(running: RunningUp, work: Callable[[Target], Any]) -> Any:
    options = running.connect_options()
    async with await Connection.connect(options, subjects=NAMES) as connection:
        names: dict[str, str] = {}
        for entry in await connection.bucket(NAMES.bucket("members")).entries():
            kind, *rest = entry.key.split(".")
            if kind == "worker":
                names["pool"], names["worker"] = rest
            elif kind in ("router", "ingress"):
                names[kind] = rest[-1]
        return await work(Target(connection, names))


def thinned(records: Iterable[Record]) -> list[bytes]:
    every = [*poison.RUBBISH, *(data for record in records for data in poison.mutations(record))]
    return every[:: len(every) // MOST + 1]


def all_of(records: Iterable[Record]) -> list[bytes]:
    return [*poison.RUBBISH, *(data for record in records for data in poison.mutations(record))]


def assert_unharmed(running: RunningUp, before: list[int]) -> None:
    """Every process is the one that it was, the deployment calls itself healthy, and answers within a second or few."""
    assert running.process.poll() is None, running.log()
    assert running.events("part.crashed") == running.events("part.left") == []
    assert running.pids() == before
    began = time.monotonic()
    assert running.chat()
    assert time.monotonic() - began < 15.0, "a good message waits behind the bad ones"
    with urllib.request.urlopen(f"{running.state()['url']}/health", timeout=5) as answer:
        assert json.load(answer)["status"] == "healthy"


def test_the_known_messages_end_nothing(running: RunningUp) -> None:
    before = running.pids()

    async def throw(target: Target) -> None:
        names = {"pool": target.pool, "worker": target.worker, "ingress": target.ingress}
        for one in poison.known(target.pool):
            subject = one.subject.format(**names)
            if subject.startswith(("hr.req", "hr.work")):
                await target.connection.publish(subject, one.data, headers=one.headers)
            else:
                target.connection.send(subject, one.data)
        await target.connection.barrier()

    asyncio.run(on_target(running, throw))
    assert_unharmed(running, before)
    running.until("they were read, and buried", lambda: len(running.events("request.malformed")) >= 5, 10)


def test_no_message_on_a_core_subject_ends_its_reader(running: RunningUp) -> None:
    before = running.pids()

    async def throw(target: Target) -> None:
        pool = target.pool
        for subject, records in (
            (NAMES.out(target.ingress), poison.frames()),
            (NAMES.judge(target.ingress), poison.ingress_controls()),
            (NAMES.control(target.worker), poison.worker_controls()),
            (NAMES.operate_worker(target.pool, target.worker), poison.worker_controls()),
            (NAMES.control(target.router), poison.router_controls()),
            (NAMES.find(pool), poison.worker_controls()),
            (NAMES.events(pool), poison.events()),
            (NAMES.load(pool, "w-none"), poison.loads()),
            (NAMES.cancel(pool), [Cancel(ids=["nothing"])]),
            (NAMES.cancel_jobs(), [Cancel(ids=["nothing"])]),
        ):
            assert await target.send_all(subject, all_of(records)) > 50

    asyncio.run(on_target(running, throw))
    assert_unharmed(running, before)


def test_no_stored_message_ends_its_reader(running: RunningUp) -> None:
    before = running.pids()

    async def throw(target: Target) -> None:
        pool, worker = target.pool, target.worker
        for subject, records in (
            (NAMES.req(pool, "std", "x"), poison.requests(pool)),
            (NAMES.req(pool, "re", "x"), poison.requests(pool)),
            (NAMES.req(pool, "batch", "x"), poison.requests(pool)),
            (NAMES.work(pool, worker), poison.requests(pool)),
            (NAMES.kv(pool, worker), poison.cache_events(worker)),
            (NAMES.kv(pool, "w-none"), poison.cache_events()),
            (NAMES.rsp("_", "poisoned"), poison.entries()),
        ):
            assert await target.store_all(subject, thinned(records)) > 15
        for strange in (f"hr.work.{pool}.a$b", f"hr.req.{pool}.std.a$b", "hr.job.sim.a$b", "hr.job.s$m.a", f"hr.kv.{pool}.a$b"):
            await target.store_all(strange, [*poison.RUBBISH, encode(poison.envelope(pool))])

    asyncio.run(on_target(running, throw))
    assert_unharmed(running, before)


def test_no_payload_or_header_ends_a_worker(running: RunningUp) -> None:
    before = running.pids()
    generation = Generation(
        token_ids=pack_u32([1, 2, 3]),
        sampling=Sampling(
            seed=1, max_tokens=2, stop_token_ids=[1], logit_bias={1: 1.0}, allowed_token_ids=[1, 2], bad_words=["a"]
        ),
        stop=["a"],
        logprobs=1,
        prompt_logprobs=1,
        guided={"choice": ["a"]},
        cache_salt="s",
        media=[{"type": "image"}],
        extra={"a": 1},
        parse=Parsing(tools=[{"type": "function", "function": {"name": "f"}}]),
        prompt_embeds=b"x",
    )
    pooling = Pooling(task="embed", inputs=[PoolingInput(pack_u32([1, 2]), 1)], dimensions=2, normalize=True, extra={"a": 1})

    async def throw(target: Target) -> None:
        pool, work = target.pool, NAMES.work(target.pool, target.worker)

        def requests(kind: str, payload: Record) -> Iterator[bytes]:
            payloads = [*poison.RUBBISH, *poison.mutations(payload)]
            for n, data in enumerate(payloads[:: len(payloads) // MOST + 1]):
                envelope = poison.envelope(
                    pool, name=f"{kind}{n}", judge=target.ingress, kind=kind, payload=data, deadline=time.time() + 10
                )
                yield encode(envelope)

        await target.store_all(work, requests("generate", generation))
        await target.store_all(work, requests("pool", pooling))
        good = encode(poison.envelope(pool))
        for name in ("Hr-Attempt", "Hr-History", "Hr-Rank", "Hr-Prefill", "Hr-Kept", "Nats-Msg-Id"):
            for n, value in enumerate(HEADER_VALUES):
                for subject in (work, NAMES.req(pool, "std", "x")):
                    headers = {name: value if name != "Nats-Msg-Id" else f"{n}{value}"}
                    await target.store_all(subject, [good], headers)

    asyncio.run(on_target(running, throw))
    assert_unharmed(running, before)


def test_no_record_in_a_bucket_ends_its_readers(running: RunningUp) -> None:
    before = running.pids()

    async def throw(target: Target) -> None:
        pool = target.pool
        for bucket, records in (
            (
                "members",
                {
                    f"worker.{pool}.w-none": poison.worker_member(pool),
                    "ingress.i-none": poison.ingress_member(),
                    f"router.{pool}.r-none": poison.router_member(pool),
                    f"worker.{pool}.a.b.c": poison.worker_member(pool),
                    "worker": poison.worker_member(pool),
                    f"snapshots.{pool}": poison.router_member(pool),
                },
            ),
            ("models", {"zz-1": poison.card("zz-1"), "yy": poison.card("other", "m2", files={})}),
            ("state", {f"snapshot.{pool}": poison.router_member(pool), "drained.w-none": poison.router_member(pool)}),
            ("batches", {"_.batch_1": poison.router_member(pool), "a.b.c": poison.router_member(pool)}),
        ):
            store = target.connection.bucket(NAMES.bucket(bucket))
            for key, record in records.items():
                values = thinned([record])
                for data in values[:: len(values) // 100 + 1]:
                    await store.put(key, data)
                await store.delete(key)

    asyncio.run(on_target(running, throw))
    assert_unharmed(running, before)
