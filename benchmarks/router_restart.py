"""Measures the start of a router that has many blocks to know again, and how long a snapshot blocks its event loop.

    .venv/bin/python -m benchmarks.router_restart                        # 1 M and 10 M blocks
    .venv/bin/python -m benchmarks.router_restart --blocks 1000000 --index pure --json out.json

A nats-server of its own on this machine. The index is filled, a snapshot is made while events go on, and events are left
behind it in the stream. Then `headrace router` is started, as a user would start it: it imports what it needs, connects,
restores, replays, takes its lease, and says `router.ready`, which is when the time is taken. Its metrics tell that all blocks
are there. The workers are leases that this process keeps. A stopwatch on the loop of the process that makes the snapshot
notes its longest wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import structlog
import uvloop

from headrace.broker.codec import encode, pack_u64
from headrace.broker.messages.events import KvStep
from headrace.broker.messages.members import WorkerMember
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.router.index.follower import KvFollower
from headrace.router.index.inventory import WorkerSlice
from headrace.router.index.snapshotter import ReplicaDeps
from headrace.router.index.view import IMPLEMENTATION_VARIABLE, Caches, create_index
from headrace.router.settings import SnapshotSettings

POOL = "bench"
SUBJECTS = Subjects("hr")
BLOCK_SIZE = 16
BLOCKS_PER_EVENT = 16
RENEW_S = 0.5  # leases last a few seconds
MOST_START_S = 120.0
EVENTS = ("settings.loaded", "pool.known", "index.restored", "index.ready", "router.ready")
BY_HAND = SnapshotSettings(every_events=10**9, every_s=1e9, refresh_s=1e9)


async def connect(url: str) -> Connection:
    """With the default prefix."""
    return await Connection.connect(ConnectOptions(servers=(url,), name="benchmark"), subjects=SUBJECTS)


def follower(connection: Connection, index: Any) -> KvFollower:
    """Create the part that keeps a router's index current, with the real index."""
    caches = Caches(create_index(index))
    deps = ReplicaDeps(
        messaging=connection, subjects=SUBJECTS, pool=POOL, router="bench", block_size=BLOCK_SIZE, settings=BY_HAND
    )
    return KvFollower(deps, caches, caches.index)


class Stopwatch:
    """The longest time in which the loop did not come round: by the clock, and of that what this thread computed. On a busy
    machine the first is mostly the time that others had the processor."""

    def __init__(self) -> None:
        self.wait_s = 0.0
        self.busy_s = 0.0

    async def run(self) -> None:
        last, last_busy = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0)
            now, busy = time.perf_counter(), time.thread_time()
            self.wait_s = max(self.wait_s, now - last)
            self.busy_s = max(self.busy_s, busy - last_busy)
            last, last_busy = now, busy


async def publish(connection: Connection, worker: str, first: int, count: int, rng: random.Random) -> None:
    """Steps that store new blocks and remove old ones."""
    gate = asyncio.Semaphore(256)

    async def one(n: int) -> None:
        blocks = [rng.getrandbits(64) for _ in range(BLOCKS_PER_EVENT)]
        step = KvStep(
            worker=worker, epoch=1, n=n, stored={"device": pack_u64(blocks)}, removed={"device": pack_u64(blocks[:4])}
        )
        try:
            await connection.publish(SUBJECTS.kv(POOL, worker), encode(step), timeout_s=30.0)
        finally:
            gate.release()

    async with asyncio.TaskGroup() as tasks:
        for n in range(first, first + count):
            await gate.acquire()
            tasks.create_task(one(n))


async def prepare(url: str, options: argparse.Namespace, blocks: int) -> dict[str, Any]:
    """Fill, make a snapshot while events come, leave events behind it."""
    rng = random.Random(1)
    shared = array("Q", (rng.getrandbits(64) for _ in range(blocks // options.workers // 10)))  # a tenth is on all workers
    async with await connect(url) as connection:
        await ensure_topology(connection, Topology(SUBJECTS))
        made = follower(connection, options.index)
        for number in range(options.workers):
            own = array("Q", (rng.getrandbits(64) for _ in range(blocks // options.workers - len(shared))))
            piece = WorkerSlice(f"w{number}", 1, -1, 0, 0, True, {"device": (shared + own).tobytes()})
            for _ in made.reader.load(piece, 0.0):
                pass
        made.reader.seq = 1
        await connection.publish(SUBJECTS.kv(POOL, "w0"), encode(KvStep(worker="w0", epoch=1, n=1)), timeout_s=30.0)
        made.snapshotter.rest_s = 0.002
        reading = asyncio.create_task(made._read_on(_begun(), time.monotonic()))
        publishing = asyncio.create_task(publish(connection, "w0", 2, options.events, rng))
        await asyncio.sleep(0.3)
        made.snapshotter._lease = _Leads()  # type: ignore[assignment]
        watch = Stopwatch()
        idle = Stopwatch()
        measuring = asyncio.create_task(idle.run())
        await asyncio.sleep(0.5)
        measuring.cancel()
        measuring = asyncio.create_task(watch.run())
        await asyncio.sleep(0)
        started = time.perf_counter()
        pointer = await made.snapshotter.snapshot()
        took_s = time.perf_counter() - started
        measuring.cancel()
        await publishing
        await publish(connection, "w1", 1, options.events, rng)
        reading.cancel()
        await asyncio.wait([reading])
        state = await connection.stream_state(SUBJECTS.stream("KV"))
    newest = pointer.kept[0]
    return {
        "blocks": newest.blocks,
        "snapshot_mb": round(newest.size / 1e6, 1),
        "snapshot_s": round(took_s, 3),
        "longest_wait_ms": round(1000 * watch.wait_s, 2),
        "longest_busy_ms": round(1000 * watch.busy_s, 2),
        "without_snapshot_ms": [round(1000 * idle.wait_s, 2), round(1000 * idle.busy_s, 2)],
        "events_behind_it": state.last_seq - newest.seq,
    }


class _Leads:
    held = True


def _begun() -> Any:
    from headrace.router.index.snapshot import Restored

    return Restored("empty", 1, 1, "")


@contextlib.asynccontextmanager
async def pool_of_workers(url: str, workers: int) -> AsyncIterator[None]:
    """Write a model card, and live leases of workers that send cache events."""
    async with await connect(url) as connection:
        card = ModelCard(model="bench", pool=POOL, context_length=32_768, block_size=BLOCK_SIZE)
        await connection.bucket(SUBJECTS.bucket("models")).put(POOL, encode(card))
        leases = connection.bucket(SUBJECTS.bucket("members"))

        async def keep() -> None:
            while True:
                for number in range(workers):
                    name = f"w{number}"
                    member = WorkerMember(
                        worker=name, pool=POOL, model="bench", slots=64, block_size=BLOCK_SIZE, epoch=1, kv_events=True
                    )
                    await leases.put(SUBJECTS.worker_key(POOL, name), encode(member))
                await asyncio.sleep(RENEW_S)

        keeping = asyncio.create_task(keep())
        await asyncio.sleep(RENEW_S)
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])


async def start_router(url: str, index: str) -> dict[str, Any]:
    """`headrace router` from the start of its process until it says that it is ready; then it is stopped."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["-m", "headrace", "router", "--nats", url, "--log-format", "json", "--router-metrics-port", str(port)]
    environment = {**os.environ, IMPLEMENTATION_VARIABLE: index}
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, env=environment
    )
    assert process.stderr is not None
    said: dict[str, float] = {}
    try:
        async with asyncio.timeout(MOST_START_S):
            while "router.ready" not in said:
                line = await process.stderr.readline()
                if not line:
                    raise RuntimeError(f"headrace router has ended with {await process.wait()}")
                if not line.startswith(b"{"):
                    raise RuntimeError(f"headrace router says {line.decode(errors='replace')!r}")
                said[json.loads(line)["event"]] = time.perf_counter() - started
        figures = await asyncio.to_thread(_metrics, port)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        async with asyncio.timeout(MOST_START_S):
            await process.communicate()
    return {
        "process_to_ready_s": round(said["router.ready"], 3),
        "until": {name: round(said[name], 3) for name in EVENTS if name in said},
        **figures,
    }


def _metrics(port: int) -> dict[str, Any]:
    """Return the router's metrics, once its gauges are set."""
    until = time.monotonic() + 5.0
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0) as answer:
            text = answer.read().decode()
        entries = _figure(text, rf'headrace_router_index_entries{{pool="{POOL}"}}')
        if entries or time.monotonic() > until:
            break
        time.sleep(0.05)
    return {
        "entries": int(entries),
        "cpu_s": round(_figure(text, "process_cpu_seconds_total"), 3),
        "rss_mb": round(_figure(text, "process_resident_memory_bytes") / 2**20),
    }


def _figure(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


async def starts_of(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure starts, one after the other."""
    async with pool_of_workers(url, options.workers):
        return [await start_router(url, options.index) for _ in range(options.runs)]


def measure(options: argparse.Namespace, blocks: int) -> dict[str, Any]:
    """Measure one row of the report: the median start."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as server:
        row = uvloop.run(prepare(server.url, options, blocks))
        starts = sorted(uvloop.run(starts_of(server.url, options)), key=lambda start: start["process_to_ready_s"])
    return {**row, "all_starts_s": [start["process_to_ready_s"] for start in starts], **starts[len(starts) // 2]}


def main() -> None:
    """Print a row per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--events", type=int, default=5000, help="left in the stream behind the snapshot")
    parser.add_argument("--index", choices=("auto", "compiled", "pure"), default="auto")
    parser.add_argument("--runs", type=int, default=3, help="restarts; the median is reported")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    rows = []
    for blocks in options.blocks:
        row = measure(options, blocks)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
