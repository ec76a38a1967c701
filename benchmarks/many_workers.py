"""Measures nats-server and routers that do nothing but know many workers: leases, load reports and cache events.

    .venv/bin/python -m benchmarks.many_workers                          # 100, 300 and 1,000 workers, one router
    .venv/bin/python -m benchmarks.many_workers --workers 1000 --routers 2 --json out.json

A nats-server of its own on this machine. The workers are leases and messages of this process, at the pace of real ones and with
the sizes of real ones; the routers are real processes. Nothing is asked of the workers: what a request costs is measured
elsewhere (`benchmarks.growth`). Where the machine is too small, this process falls behind its pace, and says by how much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.router_restart import BLOCK_SIZE, POOL, SUBJECTS, connect
from headrace.base.logs import configure
from headrace.broker.codec import encode, pack_u64
from headrace.broker.messages.events import KvStep, LoadReport
from headrace.broker.messages.members import WorkerMember
from headrace.broker.models.cards import ModelCard
from headrace.broker.settings import Timing
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.lease import RENEWALS_PER_TTL
from headrace.jetstream.provision import ensure_topology, status
from headrace.jetstream.topology import Topology
from headrace.tools.bench.serve import Usage, usage
from headrace.up.parts import choose_port

TIMING = Timing()
STORED, REMOVED = 16, 16  # blocks of one cache event: a prompt of 256 tokens comes, and as much goes
SETTLE_S = 8.0
MOST_START_S = 120.0
HOST = "127.0.0.1"


class Members:
    """Workers as the others see them."""

    def __init__(self, connection: Connection, workers: int, events_per_s: float) -> None:
        self._connection = connection
        self._events_per_s = events_per_s
        self._names = [f"w{n}" for n in range(workers)]
        self._rng = random.Random(1)  # no secret
        self._held: dict[str, list[bytes]] = {name: [] for name in self._names}
        self._numbers = dict.fromkeys(self._names, 0)
        self.late_s = 0.0

    async def run(self) -> None:
        """Keep on until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._paced(self._lease, TIMING.lease_ttl_s / RENEWALS_PER_TTL))
            tasks.create_task(self._paced(self._report, TIMING.load_period_s))
            if self._events_per_s:
                tasks.create_task(self._paced(self._step, 1 / self._events_per_s))

    async def _paced(self, act: Any, every_s: float) -> None:
        """Call `act` for one worker after the other, each once in `every_s`."""
        due = time.monotonic()
        while True:
            for name in self._names:
                due += every_s / len(self._names)
                if (early_s := due - time.monotonic()) > 0.005:
                    await asyncio.sleep(early_s)
                self.late_s = max(self.late_s, -early_s)
                await act(name)

    async def _lease(self, name: str) -> None:
        member = WorkerMember(
            worker=name, pool=POOL, model="bench", slots=64, block_size=BLOCK_SIZE, epoch=1, kv_events=True, engine="sim"
        )
        key = f"$KV.{SUBJECTS.bucket('members')}.{SUBJECTS.worker_key(POOL, name)}"
        headers = b"NATS/1.0\r\nNats-TTL: %ds\r\n\r\n" % TIMING.lease_ttl_s
        body = encode(member)
        size = len(headers)
        self._connection.core.send_now(
            f"HPUB {key} {self._connection.inbox}.x {size} {size + len(body)}\r\n".encode() + headers + body + b"\r\n"
        )

    async def _report(self, name: str) -> None:
        self._numbers[name] += 1
        report = LoadReport(
            worker=name, epoch=1, n=self._numbers[name], at=time.time(), slots=64, running=20, waiting=0,
            blocks_total=100_000, blocks_used=50_000, step_s=0.02, step_prefill_tokens=256, step_decodes=20,
        )  # fmt: skip
        self._connection.send(SUBJECTS.load(POOL, name), encode(report))

    async def _step(self, name: str) -> None:
        held = self._held[name]
        new = pack_u64([self._rng.getrandbits(64) for _ in range(STORED)])
        held.append(new)
        gone = held.pop(0) if len(held) > 64 else b""
        self._numbers[name + "kv"] = n = self._numbers.get(name + "kv", 0) + 1
        step = KvStep(worker=name, epoch=1, n=n, stored={"device": new}, removed={"device": gone} if gone else {})
        self._connection.send(SUBJECTS.kv(POOL, name), encode(step))


async def start_router(url: str) -> tuple[asyncio.subprocess.Process, int, float]:
    """Start a router. Returns it when it is ready, its metrics port, and how long that took."""
    port = choose_port(HOST, 0)
    arguments = ["-m", "headrace", "router", "--nats", url, "--log-format", "json", "--router-metrics-port", str(port)]
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    assert process.stderr is not None
    async with asyncio.timeout(MOST_START_S):
        while line := await process.stderr.readline():
            if b'"router.ready"' in line:
                break
    return process, port, time.perf_counter() - started


async def measure(workers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one row."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder))
        await server.start_async()
        routers: list[asyncio.subprocess.Process] = []
        try:
            async with await connect(server.url) as connection:
                await ensure_topology(connection, Topology(SUBJECTS))
                card = ModelCard(model="bench", pool=POOL, context_length=32_768, block_size=BLOCK_SIZE)
                await connection.bucket(SUBJECTS.bucket("models")).put(POOL, encode(card))
                members = Members(connection, workers, options.events)
                running = asyncio.create_task(members.run())
                await asyncio.sleep(TIMING.lease_ttl_s / 2)
                started = [await start_router(server.url) for _ in range(options.routers)]
                routers = [process for process, _, _ in started]
                drains = [asyncio.create_task(_read_on(process)) for process in routers]
                await asyncio.sleep(SETTLE_S)
                members.late_s = 0.0
                before = _look(server, routers)
                await asyncio.sleep(options.seconds)
                row = _row(before, _look(server, routers), options.seconds)
                row |= {"workers": workers, "routers": options.routers, "events_per_worker_s": options.events}
                row["late_s"] = round(members.late_s, 2)
                row["ready_s"] = [round(took_s, 2) for _, _, took_s in started]
                found = {s.stream: s for s in await status(connection, Topology(SUBJECTS))}
                for kind in ("KV", "LOAD"):
                    row[f"{kind.lower()}_bytes_per_message"] = _each(found[SUBJECTS.stream(kind)])
                row["lease_bytes"] = _each(found[f"KV_{SUBJECTS.bucket('members')}"])
                running.cancel()
                await asyncio.wait([running])
        finally:
            for process in routers:
                process.kill()
                await process.wait()
            await server.stop_async()
        for drain in drains:
            drain.cancel()
        await asyncio.gather(*drains, return_exceptions=True)
        return row


def _each(stream: Any) -> float:
    return round(stream.bytes / stream.messages, 1) if stream.messages else 0.0


async def _read_on(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while await process.stderr.readline():
        pass


def _look(
    server: EmbeddedServer, routers: list[asyncio.subprocess.Process]
) -> tuple[float, dict[str, Any], Usage, list[Usage], Usage]:
    with urllib.request.urlopen(f"{server.monitoring_url}/varz", timeout=5.0) as answer:  # our own
        told = json.load(answer)
    assert server.pid is not None
    return time.monotonic(), told, usage(server.pid), [usage(r.pid) for r in routers], usage(os.getpid())


def _row(before: Any, after: Any, _seconds: float) -> dict[str, Any]:
    span_s = after[0] - before[0]

    def rate(key: str) -> int:
        return round((after[1][key] - before[1][key]) / span_s)

    return {
        "in_per_s": rate("in_msgs"),
        "out_per_s": rate("out_msgs"),
        "in_kb_per_s": rate("in_bytes") // 1000,
        "out_kb_per_s": rate("out_bytes") // 1000,
        "server_cpu": round((after[2].cpu_s - before[2].cpu_s) / span_s, 3),
        "server_mb": round(after[2].rss / 2**20),
        "router_cpu": [round((b.cpu_s - a.cpu_s) / span_s, 3) for a, b in zip(before[3], after[3], strict=True)],
        "router_mb": [round(b.rss / 2**20) for b in after[3]],
        "this_cpu": round((after[4].cpu_s - before[4].cpu_s) / span_s, 3),
    }


def main() -> None:
    """Measure one row for each number of workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[100, 300, 1000])
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--events", type=float, default=2.0, help="cache events of each worker in a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    configure(level="error")
    rows = []
    for workers in options.workers:
        rows.append(uvloop.run(measure(workers, options)))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
