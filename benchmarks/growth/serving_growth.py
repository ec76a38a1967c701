"""Requests/s and CPU per request of deployments of several shapes, asked by several client processes."""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.deployment import Deployment
from benchmarks.growth.clients import Client, run, running
from headrace.tools.bench.serve import Usage, processes_of, usage

PORT = 18300
KINDS = ("frontend", "router", "worker", "nats-server", "up")
ROUTERS_S = 20.0
WARM_UP = {"streams": 64, "tokens": 16, "seconds": 0.7, "prepare": 800}
SLOTS = 256  # of each worker, so that no load waits for one


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of processes to run. `clients`: processes that ask."""

    frontends: int
    routers: int
    workers: int
    clients: int

    def __str__(self) -> str:
        return f"{self.frontends}f {self.routers}r {self.workers}w"


@dataclass(frozen=True, slots=True)
class Load:
    """Streams at once, and tokens of each answer."""

    streams: int
    tokens: int


def busy_s() -> float:
    """Return the processor seconds that the whole machine has spent so far, on anything."""
    ticks = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / 100.0


def kind_of(part: str) -> str:
    """Return the kind of a process: `frontend-2` is a frontend."""
    return next(kind for kind in KINDS if part.startswith(kind))


def parts(deployment: Deployment, shape: Shape) -> dict[str, int]:
    """Return its processes, once as many routers and frontends run as were asked for. Raises SystemExit."""
    end = time.monotonic() + ROUTERS_S
    while True:
        found = processes_of(deployment.data_dir, deployment.pid) | {"up": deployment.pid}
        numbers = [sum(kind_of(part) == kind for part in found) for kind in ("frontend", "router", "worker")]
        if numbers == [shape.frontends, shape.routers, shape.workers]:
            return found
        if time.monotonic() > end:
            raise SystemExit(f"{shape} was asked for, these run: {', '.join(sorted(found))}")
        time.sleep(0.1)


class Broker:
    """Counters of the deployment's nats-server, read by its monitoring port."""

    def __init__(self, data_dir: Path) -> None:
        ports = next(data_dir.rglob("nats-server_*.ports"))
        self._url = json.loads(ports.read_text())["monitoring"][0]

    def counts(self) -> dict[str, int]:
        """Return messages and bytes in and out so far."""
        with urllib.request.urlopen(f"{self._url}/varz", timeout=5) as answer:
            told = json.load(answer)
        return {name: told[name] for name in ("in_msgs", "out_msgs", "in_bytes", "out_bytes")}


def measure(shape: Shape, loads: Iterable[Load], seconds: float, end_s: float) -> Iterable[dict[str, Any]]:
    """Start this deployment and yield a row per load. Ends early when `end_s`, a monotonic time, has come."""
    arguments = ["--engine-arg", f"slots={SLOTS}", "--frontends", str(shape.frontends)]
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder), PORT, shape.workers, routers=shape.routers, arguments=arguments)
        asking = [("asking", str(PORT), str(number)) for number in range(shape.clients)]
        with deployment, running(asking) as ready:
            pids = parts(deployment, shape)
            broker = _broker(Path(folder))
            run(ready, **WARM_UP)  # type: ignore[arg-type]
            for load in loads:
                if time.monotonic() + seconds > end_s:
                    return
                yield {"shape": str(shape), **_row(ready, load, seconds, pids, broker)}


def _broker(data_dir: Path) -> Broker | None:
    try:
        return Broker(data_dir)
    except (OSError, ValueError, KeyError, StopIteration):
        return None


def _row(ready: list[Client], load: Load, seconds: float, pids: dict[str, int], broker: Broker | None) -> dict[str, Any]:
    prepare = int(seconds * (3000 if load.tokens < 64 else 1000) * min(4, len(ready)))

    def counted() -> tuple[dict[str, Usage], float, dict[str, int], float]:
        return (
            {part: usage(pid) for part, pid in pids.items()},
            busy_s(),
            broker.counts() if broker else {},
            time.perf_counter(),
        )

    starts: list[tuple[dict[str, Usage], float, dict[str, int], float]] = []
    found = run(
        ready,
        streams=load.streams,
        tokens=load.tokens,
        seconds=seconds,
        prepare=prepare,
        at_start=lambda: starts.append(counted()),
    )
    before, busy_before, messages_before, begun = starts[0]
    after, busy_after, messages, ended = counted()
    cpu_s = {part: after[part].cpu_s - before[part].cpu_s for part in pids}
    asked = max(1, found["ok"])
    per_request = dict.fromkeys(KINDS, 0.0)
    for part, spent in cpu_s.items():
        per_request[kind_of(part)] += spent / asked * 1e6
    moved = {name: messages[name] - messages_before[name] for name in messages}
    return {
        "streams": load.streams,
        "tokens": load.tokens,
        **found,
        "cpu_us": sum(per_request.values()),
        "cpu_us_by_kind": per_request,
        "cores_by_part": {part: spent / found["seconds"] for part, spent in cpu_s.items()},
        "machine_cores": (busy_after - busy_before) / (ended - begun),
        "rss_mib": {part: after[part].rss / 2**20 for part in pids},
        "broker_per_request": {name: value / asked for name, value in moved.items()},
        "broker_per_s": {name: value / found["seconds"] for name, value in moved.items()},
    }
