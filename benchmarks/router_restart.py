"""How long a router takes to start again with many blocks known, and how long a snapshot keeps its event loop waiting.

    .venv/bin/python -m benchmarks.router_restart                        # 1 M and 10 M blocks
    .venv/bin/python -m benchmarks.router_restart --blocks 1000000 --index pure --json out.json

A nats-server of its own on this machine. The index is filled, a snapshot is made while events go on, and events are left
behind it in the stream. Then a fresh process starts: connects, restores, replays, and is ready when it has everything that
was in the stream when it began. A stopwatch on the loop of the process that makes the snapshot notes its longest wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import structlog
import uvloop

from broker.codec import encode, pack_u64
from broker.messages import KvStep
from jetstream.client import Connection, ConnectOptions
from jetstream.manage import ensure_topology
from jetstream.server import EmbeddedServer
from jetstream.subjects import Subjects
from jetstream.topology import Topology
from router.feed.follow import KvFollower
from router.feed.gathering import WorkerSlice
from router.index.create import create_index
from router.index.view import Caches
from router.snapshots.settings import SnapshotSettings

POOL = "bench"
SUBJECTS = Subjects("hr")
BLOCKS_PER_EVENT = 16
BY_HAND = SnapshotSettings(every_events=10**9, every_s=1e9, refresh_s=1e9)


async def connect(url: str) -> Connection:
    """With the default prefix."""
    return await Connection.connect(ConnectOptions(servers=(url,), name="benchmark"), subjects=SUBJECTS)


def follower(connection: Connection, index: Any) -> KvFollower:
    """What keeps a router's index current, with the real index."""
    caches = Caches(create_index(index))
    return KvFollower(connection, SUBJECTS, POOL, caches, caches.index, router="bench", block_size=16, settings=BY_HAND)


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
            for _ in made.feed.load(piece, 0.0):
                pass
        made.feed.seq = 1
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
    from router.snapshots.restore import Restored

    return Restored("empty", 1, 1, "")


async def restart(url: str, index: str) -> None:
    """In a process of its own."""
    async with await connect(url) as connection:
        made = follower(connection, index)
        running = asyncio.create_task(made.run())
        while not made.ready:
            await asyncio.sleep(0.001)
        feed = made.feed
        assert made.restored is not None
        said = {
            "ready_s": round(made.ready_after_s, 3),
            "source": made.restored.source,
            "entries": len(feed._index),
            "cpu_s": round(time.process_time(), 3),
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        running.cancel()
        await asyncio.wait([running])


def measure(options: argparse.Namespace, blocks: int) -> dict[str, Any]:
    """One row of the report."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as server:
        row = uvloop.run(prepare(server.url, options, blocks))
        starts = []
        for _ in range(options.runs):
            started = time.perf_counter()
            command = [sys.executable, "-m", "benchmarks.router_restart", "--child", server.url, "--index", options.index]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            starts.append({"process_to_ready_s": round(time.perf_counter() - started, 3), **said})
            process.wait()
    best = sorted(starts, key=lambda start: start["process_to_ready_s"])[len(starts) // 2]
    return {**row, **best}


def main() -> None:
    """Print a row per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--events", type=int, default=5000, help="left in the stream behind the snapshot")
    parser.add_argument("--index", choices=("auto", "compiled", "pure"), default="auto")
    parser.add_argument("--runs", type=int, default=3, help="restarts; the median is reported")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    if options.child:
        uvloop.run(restart(options.child, options.index))
        return
    rows = []
    for blocks in options.blocks:
        row = measure(options, blocks)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
