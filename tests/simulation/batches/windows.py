"""Three batches with windows of very different lengths on one pool with few slots, in virtual time.

The owner's division of lines and the carrier's order of jobs are the real ones; the pool answers each line after 40 s.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from headrace.broker.batches.record import BatchRecord
from headrace.broker.batches.service import Batches, NewBatch
from headrace.broker.batches.settings import BatchSettings
from headrace.broker.batches.store import BatchStore, StoredFiles
from headrace.broker.durable.held_job import HeldJob
from headrace.broker.durable.intake import WaitingJobs
from headrace.broker.durable.results import ResultStore
from headrace.broker.durable.stored_job import parse_job
from headrace.broker.durable.stream_writer import window
from headrace.broker.files.records import FileRecord
from headrace.broker.files.store import FileStore
from headrace.broker.messages.durable import JobResult, ResultResponse
from headrace.jetstream.ports import Delivery
from headrace.jetstream.topology import JOB_ACK_WAIT_S, Topology, job_consumer
from tests.simulation.batches.deployment import ENDPOINT, SUBJECTS, TENANT, Deployment, input_lines
from tests.simulation.virtual.loop import EPOCH_S
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.objects import SimObject

SLOTS = 8
LINE_S = 40.0
LINES = {"24h": 900, "2h": 360, "30m": 180}  # in the order in which they come: 75, 30 and 15 minutes of all slots
APART_S = 60.0


@dataclass
class BatchWindows(Deployment):
    """`settings` are those of a deployment, unless the test says otherwise."""

    settings: BatchSettings = field(default_factory=BatchSettings)
    slots: Callable[[str], int] | None = lambda _model: SLOTS
    keep_s: float = 100_000.0
    batches: dict[str, str] = field(default_factory=dict)  # id by completion window

    def build(self) -> None:
        self.world.server.install(Topology(subjects=SUBJECTS))
        for length, lines in LINES.items():
            data = input_lines(lines)
            name = f"file-{length}"
            self.world.server.objects["hr_files"][f"{TENANT}/{name}"] = SimObject(data, 0.0)
            kept = FileRecord(id=name, tenant=TENANT, bytes=len(data), created=EPOCH_S, filename="in.jsonl", purpose="batch")
            self.world.server.buckets["hr_files"].put(kept.key, msgspec.json.encode(kept), None)
        self.world.process("F0", self.frontend)
        self.world.process("C0", self.carrier)
        self.world.process("K", self.client)

    async def carrier(self, machine: Machine) -> None:
        messaging = machine.messaging
        results = ResultStore(messaging, SUBJECTS)
        consumer = job_consumer(SUBJECTS, "m")
        waiting = WaitingJobs()
        held: dict[int, HeldJob] = {}
        started: Counter[str] = Counter()

        def took(delivery: Delivery) -> None:
            headers = delivery.headers or {}
            job = parse_job(delivery.data, headers, tenant=TENANT, seq=delivery.stream_seq, stored=machine.wall())
            one = HeldJob(job, "m", delivery, messaging, SUBJECTS, nonce=f"{delivery.stream_seq}")
            held[one.seq] = one
            waiting.add(one)

        async def extend_claims() -> None:
            while True:
                await asyncio.sleep(JOB_ACK_WAIT_S / 3)
                for one in held.values():
                    one.delivery.progress()

        async def answer_lines() -> None:
            while True:
                one = waiting.take(started)
                if one is None:
                    await asyncio.sleep(1.0)
                    continue
                await asyncio.sleep(LINE_S)
                response = ResultResponse(status_code=200, request_id="r", body=msgspec.Raw(b'{"ok":true}'))
                result = JobResult(id=one.job.name, status="done", custom_id=one.job.custom_id, response=response)
                await results.commit(TENANT, one.job.name, result)
                one.delivery.ack()
                del held[one.seq]
                loop.add_credit()

        async with asyncio.TaskGroup() as group:
            await messaging.ensure_consumer(consumer)
            loop = messaging.pull(SUBJECTS.stream("JOB"), consumer.name, took, credit=window(SLOTS, 1, 1024))
            for part in (loop.run(), extend_claims(), *(answer_lines() for _ in range(SLOTS))):
                group.create_task(part)

    async def client(self, machine: Machine) -> None:
        await asyncio.sleep(1.0)
        owner = self.world.newest("F0")
        assert owner is not None
        store = BatchStore(machine.messaging, SUBJECTS, keep_s=self.keep_s)
        files = StoredFiles(FileStore(machine.messaging, SUBJECTS, now=machine.wall))
        service = Batches(store, files, self.settings, me=f"i-{owner.id}", wall=machine.wall)
        for length in LINES:
            new = NewBatch(endpoint=ENDPOINT, input_file_id=f"file-{length}", completion_window=length)
            self.batches[length] = (await service.create(TENANT, new)).id
            await asyncio.sleep(APART_S)

    def records(self) -> dict[str, BatchRecord]:
        """The records of the batches by completion window."""
        found = {}
        for length, batch in self.batches.items():
            entry = self.world.server.buckets["hr_batches"].get(f"{TENANT}.{batch}")
            assert entry is not None
            found[length] = msgspec.json.decode(entry.value, type=BatchRecord)
        return found

    @property
    def over(self) -> bool:
        """All batches have ended."""
        records = self.records()
        return len(records) == len(LINES) and all(record.final for record in records.values())
