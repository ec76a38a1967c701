"""Measures the owner of a batch, in this process: validation, fan-out, looking at results, writing both files.

A carrier in a process of its own answers every line at once, so the figures are those of batches and of the server alone.

python -m benchmarks.batches.owner --lines 50000
python -m benchmarks.batches.owner --lines 50000 --line-bytes 3900 --take-over     # by a new owner, when most lines have ended
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
import structlog

from headrace.broker.batches.batch_run import BatchParts, BatchRun
from headrace.broker.batches.fan_out import FanOut, ScratchSpace
from headrace.broker.batches.record import BatchRecord, new_batch_id
from headrace.broker.batches.settings import BatchSettings
from headrace.broker.batches.store import BatchStore, StoredFiles
from headrace.broker.batches.validation import InputLimits
from headrace.broker.durable.results import ResultStore
from headrace.broker.files.store import FileDraft, FileStore
from headrace.broker.messages.durable import JobResult, ResultResponse
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.ports import Delivery
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology, job_consumer

NAMES = Subjects("hr")
TENANT = "_"
MODEL = "m"
MIB = 1024 * 1024
MOST = 0.9  # of the lines have a result when the first owner is stopped
ANSWER = json.dumps({"choices": ["x" * 400]}).encode()


class _NoStopper:
    async def stop(self, record: BatchRecord, names: Sequence[str]) -> None:
        return None


async def _carry(url: str) -> None:
    """Answer every job until the process is ended."""
    async with await Connection.connect(ConnectOptions(servers=(url,)), subjects=NAMES) as connection:
        results, consumer = ResultStore(connection, NAMES), job_consumer(NAMES, MODEL)
        await connection.ensure_consumer(consumer)
        async with asyncio.TaskGroup() as group:

            async def answer(delivery: Delivery) -> None:
                name, line = delivery.headers["Hr-Job"], json.loads(delivery.data)
                response = ResultResponse(status_code=200, request_id="r", body=msgspec.Raw(ANSWER))
                result = JobResult(id=name, status="done", custom_id=line["custom_id"], response=response)
                await results.commit(TENANT, name, result)
                delivery.ack()
                loop.add_credit()

            loop = connection.pull(
                consumer.stream, consumer.name, lambda delivery: group.create_task(answer(delivery)), credit=128
            )
            await loop.run()


def carry(url: str) -> None:
    """Run the carrier in its own process."""
    asyncio.run(_carry(url))


async def _input(lines: int, line_bytes: int) -> AsyncIterator[bytes]:
    for number in range(lines):
        body = {"model": MODEL, "prompt": f"{number} " + "x" * line_bytes}
        yield json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}).encode() + b"\n"


async def _stop_and_take_over(parts: BatchParts, batch: BatchRecord) -> None:
    """Stop an owner when most lines have a result, and print how long another one takes before it publishes the next lines."""
    first = asyncio.create_task(BatchRun(parts, TENANT, batch.id, "me").run())
    while (record := (await parts.store.read(TENANT, batch.id)).record).counts.completed < MOST * max(1, record.counts.total):
        await asyncio.sleep(0.1)
    first.cancel()
    await asyncio.wait([first])
    before = await parts.store.read(TENANT, batch.id)
    began, cpu_s = time.perf_counter(), time.process_time()
    second = asyncio.create_task(BatchRun(parts, TENANT, batch.id, "me").run())
    while not second.done() and (await parts.store.read(TENANT, batch.id)).revision == before.revision:
        await asyncio.sleep(0.02)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    print(f"taken over behind line {before.record.cursor} in {seconds:.1f} s, {cpu_s:.1f} s of CPU")
    await second


async def _own(connection: Connection, lines: int, line_bytes: int, *, take_over: bool) -> None:
    """Take one batch from its file to its end, and print what that took."""
    store, stored = FileStore(connection, NAMES), BatchStore(connection, NAMES, keep_s=3600)
    file = await store.create(FileDraft(tenant=TENANT, filename="in.jsonl", purpose="batch"), _input(lines, line_bytes))
    files = StoredFiles(store)
    now = time.time()
    batch = BatchRecord(
        id=new_batch_id(),
        tenant=TENANT,
        endpoint="/v1/completions",
        input_file_id=file.id,
        completion_window="24h",
        created=now,
        expires_at=int(now) + 86_400,
        owner="me",
    )
    await stored.create(batch)
    parts = BatchParts(
        store=stored,
        files=files,
        results=ResultStore(connection, NAMES),
        fan_out=FanOut(connection, NAMES, files),
        stopper=_NoStopper(),
        notice=None,
        settings=BatchSettings(),
        limits=InputLimits(),
        others=list,
        scratch=ScratchSpace(BatchSettings().copied_bytes),
    )
    before, cpu_s, began = _most_bytes(), time.process_time(), time.perf_counter()
    if take_over:
        await _stop_and_take_over(parts, batch)
    else:
        await BatchRun(parts, TENANT, batch.id, "me").run()
    cpu_ms, seconds = (time.process_time() - cpu_s) * 1000, time.perf_counter() - began
    record = (await stored.read(TENANT, batch.id)).record
    print(f"{record.status}, {record.counts}, {file.bytes / MIB:.0f} MiB")
    print(f"{lines / seconds:.0f} lines/s, {cpu_ms / lines:.3f} ms of CPU a line")
    print(f"memory at most {before / MIB:.0f} MiB before, {_most_bytes() / MIB:.0f} MiB after")


def _most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def _measure(wishes: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(folder) as server:
        options = ConnectOptions(servers=(server.url,))
        async with await Connection.connect(options, subjects=NAMES) as connection:
            await ensure_topology(connection, Topology(NAMES))
            carrier = multiprocessing.get_context("spawn").Process(target=carry, args=(server.url,))
            carrier.start()
            try:
                await _own(connection, wishes.lines, wishes.line_bytes, take_over=wishes.take_over)
            finally:
                carrier.terminate()
                carrier.join()


def main() -> None:
    """Measure one batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--line-bytes", type=int, default=900)
    parser.add_argument("--take-over", action="store_true", help="stop the owner when most lines have a result")
    wishes = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    asyncio.run(_measure(wishes))


if __name__ == "__main__":
    main()
