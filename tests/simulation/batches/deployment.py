"""Frontends that own batches, a carrier that answers lines at random, and a client: real batches over the simulated server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from headrace.broker.batches.batch_run import BatchParts
from headrace.broker.batches.fan_out import FanOut
from headrace.broker.batches.record import BatchRecord, line_name
from headrace.broker.batches.service import Batches, BatchOwner, NewBatch
from headrace.broker.batches.settings import BatchSettings
from headrace.broker.batches.store import BatchStore, BatchView, StoredFiles
from headrace.broker.batches.validation import InputLimits
from headrace.broker.durable.results import ResultStore, decode_result
from headrace.broker.files.records import FileRecord
from headrace.broker.files.store import FileStore
from headrace.broker.membership.members import Members
from headrace.broker.messages.durable import JobResult, ResultResponse
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Delivery
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology, job_consumer
from tests.simulation.search import Scenario
from tests.simulation.virtual.loop import EPOCH_S
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import SimConfig
from tests.simulation.virtual.objects import SimObject
from tests.simulation.virtual.world import Violation, World

TTL_S = 3.0
SUBJECTS = Subjects("hr")
ENDPOINT = "/v1/chat/completions"
INPUT = "file-input"
TENANT = "acme"


def input_lines(count: int) -> bytes:
    """An input file; lines with the same system prompt are not side by side."""
    lines = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {
                "model": "m",
                "messages": [{"role": "system", "content": f"s{i % 2}"}, {"role": "user", "content": f"{i}"}],
            },
        }
        for i in range(1, count + 1)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def broken_lines(count: int) -> bytes:
    """An input file whose last line repeats the id of the first one."""
    return input_lines(count) + input_lines(1)


class _Stopper:
    async def stop(self, record: BatchRecord, names: Sequence[str]) -> None:
        return None


class _Webhook:
    """Hears of ends; every other call fails."""

    def __init__(self, told: list[str]) -> None:
        self._told = told
        self._calls = 0

    async def send(self, record: BatchRecord) -> bool:
        self._told.append(record.status)
        self._calls += 1
        return self._calls % 2 == 0


class _Leases:
    def __init__(self, keeper: LeaseKeeper, members: Members) -> None:
        self._keeper = keeper
        self.ingress_live = members.ingress_live
        self.ingress_gone = members.ingress_gone

    @property
    def held(self) -> bool:
        return self._keeper.held


@dataclass
class Deployment:
    """Two frontends, a carrier and a client. `cancel_at_s`, `window` and `slow_s` choose the end of the batch."""

    world: World
    lines: int = 5
    window: str = "24h"
    cancel_at_s: tuple[float, float] | None = None  # between these, by the seed
    slow_s: float = 0.3  # the longest that a line takes
    settings: BatchSettings = field(default_factory=lambda: BatchSettings(window_lines=3))
    keep_s: float = 1000.0
    slots: Callable[[str], int] | None = None
    broken: bool = False  # the input file is invalid
    behind_s: float = 0.0  # of the client's clock, so that less is left of the window
    batch: str = ""
    told: str = ""  # what the canceller was told
    heard: list[str] = field(default_factory=list)  # ends, by the webhook

    def build(self) -> None:
        self.world.server.install(Topology(subjects=SUBJECTS))
        data = broken_lines(self.lines) if self.broken else input_lines(self.lines)
        self.world.server.objects["hr_files"][f"{TENANT}/{INPUT}"] = SimObject(data, 0.0)
        kept = FileRecord(id=INPUT, tenant=TENANT, bytes=len(data), created=EPOCH_S, filename="in.jsonl", purpose="batch")
        self.world.server.buckets["hr_files"].put(kept.key, msgspec.json.encode(kept), None)
        for name in ("F0", "F1"):
            self.world.process(name, self.frontend, restart=True)
        self.world.process("C0", self.carrier, restart=True)
        self.world.process("K", self.client, restart=True)

    async def frontend(self, machine: Machine) -> None:
        messaging, me = machine.messaging, f"i-{machine.id}"
        members = Members(messaging, SUBJECTS, lease_ttl_s=TTL_S)
        view = BatchView(messaging, SUBJECTS)
        files = StoredFiles(FileStore(messaging, SUBJECTS, now=machine.wall))
        keeper = LeaseKeeper(
            messaging, "hr_members", SUBJECTS.ingress_key(me), me.encode(), ttl_s=TTL_S, on_change=lambda held: None
        )
        parts = BatchParts(
            store=BatchStore(messaging, SUBJECTS, keep_s=self.keep_s),
            files=files,
            results=ResultStore(messaging, SUBJECTS),
            fan_out=FanOut(messaging, SUBJECTS, files),
            stopper=_Stopper(),
            notice=_Webhook(self.heard),
            settings=self.settings,
            limits=InputLimits(),
            others=view.records,
            slots=self.slots,
            wall=machine.wall,
        )
        owner = BatchOwner(parts, view, _Leases(keeper, members), me=me)
        async with asyncio.TaskGroup() as group:
            group.create_task(keeper.run())
            group.create_task(members.run())
            group.create_task(owner.run())

    async def carrier(self, machine: Machine) -> None:
        messaging = machine.messaging
        results = ResultStore(messaging, SUBJECTS)
        consumer = job_consumer(SUBJECTS, "m")

        async def ensure() -> None:
            await messaging.ensure_consumer(consumer)

        async with asyncio.TaskGroup() as group:

            async def carry(delivery: Delivery) -> None:
                name = delivery.headers["Hr-Job"]
                try:
                    until = self.world.now + machine.rng.random() * self.slow_s
                    while self.world.now < until:  # a look at the end of the job each three seconds
                        await asyncio.sleep(min(3.0, until - self.world.now))
                        if await results.get(TENANT, name) is not None:
                            delivery.ack()
                            return
                    line = json.loads(delivery.data)
                    good = int(line["custom_id"][1:]) % 3 != 0
                    response = ResultResponse(
                        status_code=200 if good else 400, request_id="r", body=msgspec.Raw(b'{"ok":true}')
                    )
                    result = JobResult(
                        id=name, status="done" if good else "failed", custom_id=line["custom_id"], response=response
                    )
                    await results.commit(TENANT, name, result)
                    delivery.ack()
                except JetStreamError:
                    pass
                finally:
                    loop.add_credit()

            def took(delivery: Delivery) -> None:
                group.create_task(carry(delivery))

            while True:
                try:
                    await ensure()
                    break
                except JetStreamError:
                    await asyncio.sleep(0.3)
            loop = messaging.pull(SUBJECTS.stream("JOB"), consumer.name, took, credit=4, on_missing=ensure)
            group.create_task(loop.run())

    async def client(self, machine: Machine) -> None:
        await asyncio.sleep(0.2)
        first = self.world.newest("F0")
        owner = f"i-{first.id}" if first is not None else "i-gone"
        store = BatchStore(machine.messaging, SUBJECTS, keep_s=1000.0)
        batches = Batches(
            store,
            StoredFiles(FileStore(machine.messaging, SUBJECTS, now=machine.wall)),
            self.settings,
            me=owner,
            wall=lambda: machine.wall() - self.behind_s,
        )
        new = NewBatch(endpoint=ENDPOINT, input_file_id=INPUT, completion_window=self.window)
        while not self.batch:
            try:
                there = await batches.list(TENANT)  # a client that died may have created it
                self.batch = there[0].id if there else (await batches.create(TENANT, new)).id
            except JetStreamError:
                await asyncio.sleep(0.3)
        if self.cancel_at_s is None:
            return
        low, high = self.cancel_at_s
        await asyncio.sleep(low + machine.rng.random() * (high - low))
        while not self.told:
            try:
                self.told = (await batches.cancel(TENANT, self.batch)).status
            except JetStreamError:
                await asyncio.sleep(0.2)
            except Exception as error:
                self.told = type(error).__name__

    # -- the promises -----------------------------------------------------------------------------------------------------

    @property
    def record(self) -> BatchRecord | None:
        entry = self.world.server.buckets["hr_batches"].get(f"{TENANT}.{self.batch}") if self.batch else None
        return msgspec.json.decode(entry.value, type=BatchRecord) if entry is not None else None

    def leftovers(self) -> list[str]:
        record = self.record
        if record is None or not record.final or record.notice == "due":
            return [f"batch {record}"]
        jobs = self.world.server.streams["HR_JOB"].messages
        return [f"{len(jobs)} jobs"] if jobs else []

    def verify(self) -> None:
        record = self.record
        assert record is not None
        cancelled = self.cancel_at_s is not None and record.status == "cancelled"  # whatever the canceller was told of it
        if (record.status == "failed") is not self.broken and not cancelled:
            raise Violation(f"{record.status}: {record.errors}")
        if set(self.heard) != {record.status}:
            raise Violation(f"the webhook heard of {self.heard}, and it is {record.status}")
        if self.told == "cancelling" and record.status != "cancelled":
            raise Violation(f"told {self.told}, and it is {record.status}")
        stream = self.world.server.streams["HR_RESULT"]
        results = {}
        for number in range(1, record.counts.total + 1):
            name = line_name(record.id, number)
            stored = stream.of_subject(SUBJECTS.result(TENANT, name), 2)
            if len(stored) != 1:
                raise Violation(f"{len(stored)} results of {name}")
            results[f"c{number}"] = decode_result(stored[0].data)
        if record.counts.total not in (0, self.lines):
            raise Violation(f"{record.counts.total} lines")
        objects = self.world.server.objects["hr_files"]
        named = {"output": record.output_file_id, "error": record.error_file_id}
        for kind, file_id in named.items():
            wanted = {c for c, r in results.items() if (r.status == "done") == (kind == "output")}
            if file_id is None:
                found: list[str] = []
            elif (stored_file := objects.get(f"{TENANT}/{file_id}")) is None:
                raise Violation(f"the {kind} file is gone")
            else:
                found = [json.loads(line)["custom_id"] for line in stored_file.data.splitlines()]
            if sorted(found) != sorted(wanted):
                raise Violation(f"the {kind} file has {found} in place of {wanted}")
        done = sum(r.status == "done" for r in results.values())
        if (record.counts.completed, record.counts.failed) != (done, len(results) - done):
            raise Violation(f"counts {record.counts} of {done} done")
        if record.status == "completed" and any(r.status in ("cancelled", "expired") for r in results.values()):
            raise Violation("completed with lines that did not run")


def scenario(
    config: SimConfig,
    *,
    check: Callable[[Deployment], None] | None = None,
    faults: int = 4,
    until_s: float = 120.0,
    **options: object,
) -> Scenario:
    def build(world: World) -> Deployment:
        deployment = Deployment(world, **options)  # type: ignore[arg-type]
        deployment.build()
        if check is not None:
            world.at(0.0, partial(check, deployment))
        return deployment

    return Scenario(name="batches", build=build, config=config, victims=("F0", "F1", "C0"), faults=faults, until_s=until_s)
