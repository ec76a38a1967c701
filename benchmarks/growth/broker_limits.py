"""Measures the limits of one nats-server: messages and bytes per second, in core and in streams, beside few and many things."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.growth.clients import running
from benchmarks.growth.raw_client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.settings import ServerSettings
from headrace.tools.bench.serve import usage

CONNECTED_S = 20.0
OVERTIME_S = 20.0
Order = tuple[str, dict[str, Any]]  # a role, and what it is told


@dataclass(frozen=True, slots=True)
class Step:
    """Clients that work at once. `unit`: the role whose messages count."""

    name: str
    size: int
    orders: tuple[Order, ...]
    unit: str
    storage: str = "file"
    streams: int = 0
    consumers: tuple[int, int] = (0, 0)  # that are pulled from, of each stream; that no client pulls from, of the first
    counted: dict[str, int] = field(default_factory=dict)  # said beside the figures


def core_steps() -> Iterator[Step]:
    """Publish and subscribe without streams."""
    for publishers in (1, 4):
        yield Step(f"core {publishers}→0", 128, tuple(("publish", {"subject": f"a{n}"}) for n in range(publishers)), "publish")
    for size in (128, 4096, 65536):
        for pairs in (1, 4):
            sides = [(role, {"subject": f"a{n}"}) for n in range(pairs) for role in ("subscribe", "publish")]
            yield Step(f"core {pairs}→{pairs}", size, tuple(sides), "subscribe")
    eight: list[Order] = [("subscribe", {"subject": "a"}) for _ in range(8)]
    yield Step("core 1→8 each", 128, (*eight, ("publish", {"subject": "a"})), "subscribe")


def store_steps() -> Iterator[Step]:
    """Store with acks, and store, pull and ack, as work queues do."""
    for storage in ("memory", "file"):
        for size in (128, 4096):
            for publishers, streams in ((1, 1), (8, 1), (8, 8)):
                orders = tuple(("store", {"subject": f"s{n % streams}.{n}"}) for n in range(publishers))
                yield Step(f"store {publishers} into {streams} {storage}", size, orders, "store", storage, streams)
        for streams in (1, 8):
            sides: list[Order] = [("store", {"subject": f"s{n % streams}.{n}"}) for n in range(8)]
            sides += [("consume", {"consumer": f"s{n % streams}.c0"}) for n in range(8)]
            yield Step(f"queue 8→8 of {streams} {storage}", 1024, tuple(sides), "consume", storage, streams, (1, 0))


def count_steps(quick: bool) -> Iterator[Step]:
    """Store with acks beside ever more consumers and streams; publish beside ever more subscriptions."""
    orders = tuple(("store", {"subject": f"s0.{n}"}) for n in range(4))
    for consumers in (0, 100) if quick else (0, 10, 100, 1000):
        yield Step("store, idle consumers", 1024, orders, "store", "file", 1, (0, consumers), {"consumers": consumers})
    for streams in (1, 20) if quick else (1, 10, 100, 500):
        spread = tuple(("store", {"subject": f"s{n}.0"}) for n in range(4) if n < streams)
        yield Step("store, streams", 1024, spread, "store", "file", streams, (0, 0), {"streams": streams})
    for more in (0, 2000) if quick else (0, 1000, 10_000, 100_000):
        one: list[Order] = [("subscribe", {"subject": "a", "more_subscriptions": more // 4})]
        one += [("subscribe", {"subject": f"b{n}", "more_subscriptions": more // 4}) for n in range(3)]
        yield Step(
            "core 1→1, subscriptions", 128, (*one, ("publish", {"subject": "a"})), "subscribe", counted={"subscriptions": more}
        )


def settings() -> ServerSettings:
    """Return what `headrace up` has by default, but that a connection may have all the subscriptions that a step wants."""
    return ServerSettings(max_subscriptions=200_000)


def measure(step: Step, seconds: float) -> dict[str, Any]:
    """Run a step on a server of its own. Raises ClientFailed, OSError or ConnectError."""
    folder = Path(tempfile.mkdtemp())
    try:
        with EmbeddedServer(folder, settings()) as server:
            made_s = make_streams(server.port, step)
            return {"step": step.name, "size": step.size, **step.counted, **_work(step, server, seconds), **made_s}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_streams(port: int, step: Step) -> dict[str, float]:
    """Make the streams and consumers of a step. Returns how long each took to make, in milliseconds."""
    with closing(Connection(port)) as connection:
        return _make(connection, step)


def _make(connection: Connection, step: Step) -> dict[str, float]:
    begun = time.perf_counter()
    for number in range(step.streams):
        retention = "workqueue" if step.consumers[0] else "limits"
        config = {"name": f"s{number}", "subjects": [f"s{number}.>"], "storage": step.storage, "retention": retention}
        config |= {"max_bytes": 200_000_000 if step.storage == "memory" and step.streams == 1 else 50_000_000, "discard": "old"}
        connection.request(f"$JS.API.STREAM.CREATE.s{number}", json.dumps(config).encode())
    streams_s = time.perf_counter() - begun
    made = [(f"s{stream}", f"c{n}") for stream in range(step.streams) for n in range(step.consumers[0])]
    made += [("s0", f"idle{n}") for n in range(step.consumers[1])]
    begun = time.perf_counter()
    for stream, name in made:
        config = {"durable_name": name, "ack_policy": "explicit", "max_ack_pending": 100_000}
        if name.startswith("idle"):
            config["filter_subject"] = f"{stream}.of.{name}"
        body = json.dumps({"stream_name": stream, "config": config}).encode()
        connection.request(f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.{name}", body)
    consumers_s = time.perf_counter() - begun
    return {"ms_per_stream": streams_s * 1e3 / max(1, step.streams), "ms_per_consumer": consumers_s * 1e3 / max(1, len(made))}


def _work(step: Step, server: EmbeddedServer, seconds: float) -> dict[str, Any]:
    common = {"port": server.port, "size": step.size, "seconds": seconds}
    commands = [("raw_client", role, json.dumps({**common, **order})) for role, order in step.orders]
    with running(commands) as ready:
        for client in ready:
            client.said(CONNECTED_S)
        before = usage(server.pid or 0)
        for client in ready:
            client.tell("")
        told = [client.said(seconds + OVERTIME_S) for client in ready]
        after = usage(server.pid or 0)
    counted = [one for one in told if one["role"] == step.unit]
    wall_s = max(one["ended"] for one in told) - min(one["begun"] for one in told)
    messages = sum(one["messages"] for one in counted)
    spent_s = after.cpu_s - before.cpu_s
    return {
        "messages_s": messages / wall_s,
        "mib_s": messages / wall_s * step.size / 2**20,
        "server_cores": spent_s / wall_s,
        "server_us_per_message": spent_s / max(1, messages) * 1e6,
        "server_rss_mib": after.rss / 2**20,
        "busiest_client": max(one["cores"] for one in told),
    }
