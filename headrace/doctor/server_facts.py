"""Asks a NATS server what `headrace doctor` checks: its API over the connection, and its monitoring port where there is one."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.base.errors import CommandError
from headrace.doctor.facts import (
    AccountLimits,
    ConsumerFacts,
    MonitoringFacts,
    PeerFacts,
    ServerFacts,
    StreamFacts,
)
from headrace.jetstream.client import Connection
from headrace.jetstream.core.api import STREAM_NOT_FOUND, ApiError
from headrace.jetstream.errors import AccessDenied
from headrace.jetstream.provision import StreamPlan, differences, parse_time, wanted_config
from headrace.jetstream.specs import StreamSpec
from headrace.jetstream.topology import Topology

_HTTP_TIMEOUT_S = 3.0
_NS = 1e9


@dataclass(slots=True)
class _Seen:
    """Facts that were read so far. The narrowest time around an answer bounds the error of the clocks' difference."""

    plans: list[StreamPlan] = field(default_factory=list)
    streams: list[StreamFacts] = field(default_factory=list)
    denied: list[str] = field(default_factory=list)
    skew: tuple[float, float] | None = None  # half of the time that the answer took, and the difference

    def timed(self, server_time: str | None, before_s: float, after_s: float) -> None:
        """Note the server's time in an answer to a question that was sent and answered at these times."""
        if server_time is None:
            return
        half_s = (after_s - before_s) / 2
        if self.skew is None or half_s < self.skew[0]:
            self.skew = (half_s, parse_time(server_time).timestamp() - (before_s + half_s))


async def read_server(connection: Connection, topology: Topology, *, monitoring_url: str | None) -> ServerFacts:
    """Return what this connection sees of its server. What the login may not ask is named in `denied`.

    Raises a JetStreamError when the server stops answering, CommandError for a monitoring port that does not.
    """
    seen = _Seen()
    limits = await _limits(connection, seen)
    for spec in topology.all_streams():
        await _read_stream(connection, spec, seen)
    info = connection.core.info
    return ServerFacts(
        version=connection.server_version,
        cluster=str(info.get("cluster") or ""),
        max_payload=connection.max_payload,
        limits=limits,
        plans=tuple(seen.plans),
        streams=tuple(seen.streams),
        skew_s=None if seen.skew is None else seen.skew[1],
        skew_bound_s=0.0 if seen.skew is None else seen.skew[0],
        monitoring=await asyncio.to_thread(read_monitoring, monitoring_url) if monitoring_url else None,
        denied=tuple(seen.denied),
    )


def read_monitoring(url: str) -> MonitoringFacts:
    """Return what a monitoring port tells. Raises CommandError when the port does not answer as nats-server does."""
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--monitoring {url!r} is no http address")
    try:
        config = _told(url, "jsz?config=true")["config"]
        return MonitoringFacts(
            max_memory=int(config["max_memory"]),
            max_storage=int(config["max_storage"]),
            sync_interval_s=0.0 if config.get("sync_always") else int(config.get("sync_interval", 0)) / _NS,
            store_dir=str(config.get("store_dir", "")),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"--monitoring {url}: no monitoring port of a nats-server with JetStream answers: {error}") from None


def _told(url: str, page: str) -> Any:
    with urllib.request.urlopen(f"{url.rstrip('/')}/{page}", timeout=_HTTP_TIMEOUT_S) as answer:  # noqa: S310  # checked above
        return json.load(answer)


def embedded_monitoring(data_dir: Path) -> str | None:
    """Return the monitoring address of the server that `headrace up` runs on this folder, None if there is none."""
    for ports in sorted((data_dir / "nats" / "run").glob("nats-server_*.ports")):
        pid = re.search(r"_(\d+)\.ports$", ports.name)
        if pid is None or not Path(f"/proc/{pid[1]}").exists():
            continue
        try:
            return str(json.loads(ports.read_text())["monitoring"][0])
        except (OSError, ValueError, LookupError):
            continue
    return None


async def _limits(connection: Connection, seen: _Seen) -> AccountLimits:
    try:
        told = await connection.api.call("INFO")
    except AccessDenied:
        seen.denied.append("$JS.API.INFO")
        return AccountLimits()
    limits: Mapping[str, Any] = told.get("limits") or {}
    return AccountLimits(
        memory=limits.get("max_memory", -1),
        storage=limits.get("max_storage", -1),
        streams=limits.get("max_streams", -1),
        used_memory=told.get("memory", 0),
        used_storage=told.get("storage", 0),
    )


async def _read_stream(connection: Connection, spec: StreamSpec, seen: _Seen) -> None:
    before_s = time.time()
    try:
        info = await connection.api.call(f"STREAM.INFO.{spec.name}")
    except AccessDenied:
        seen.denied.append(f"$JS.API.STREAM.INFO.{spec.name}")
        return
    except ApiError as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
        if spec.on_demand:
            return
        seen.plans.append(StreamPlan(spec.name, "create"))
        return
    seen.timed(info.get("ts"), before_s, time.time())
    changes = differences(info["config"], wanted_config(spec, info))
    seen.plans.append(StreamPlan(spec.name, "update" if changes else "keep", changes))
    facts = stream_facts(info, await _consumers(connection, spec.name, seen))
    seen.streams.append(replace(facts, one_copy=spec.replicas == 1))


def stream_facts(info: Mapping[str, Any], consumers: tuple[ConsumerFacts, ...]) -> StreamFacts:
    """Return a stream as its `STREAM.INFO` describes it."""
    config, state, cluster = info["config"], info["state"], info.get("cluster") or {}
    return StreamFacts(
        name=config["name"],
        storage=config.get("storage", "file"),
        messages=state["messages"],
        bytes=state["bytes"],
        max_bytes=config.get("max_bytes", -1),
        replicas=config.get("num_replicas", 1),
        leader=cluster.get("leader", ""),
        peers=tuple(
            PeerFacts(
                name=peer["name"],
                current=bool(peer.get("current", False)),
                offline=bool(peer.get("offline", False)),
                lag=int(peer.get("lag", 0)),
            )
            for peer in cluster.get("replicas") or ()
        ),
        consumers=consumers,
    )


def consumer_facts(info: Mapping[str, Any]) -> ConsumerFacts:
    """Return a consumer as `CONSUMER.LIST` describes it."""
    cluster = info.get("cluster") or {}
    lasting = "name" in cluster and bool(info["config"].get("durable_name"))
    return ConsumerFacts(
        name=info["name"],
        waiting=info.get("num_pending", 0),
        unacked=info.get("num_ack_pending", 0),
        open_pulls=info.get("num_waiting", 0),
        copies=bool(cluster.get("leader")) + len(cluster.get("replicas") or ()) if lasting else 0,
    )


async def _consumers(connection: Connection, stream: str, seen: _Seen) -> tuple[ConsumerFacts, ...]:
    found: list[ConsumerFacts] = []
    while True:
        try:
            page = await connection.api.call(f"CONSUMER.LIST.{stream}", {"offset": len(found)})
        except AccessDenied:
            seen.denied.append(f"$JS.API.CONSUMER.LIST.{stream}")
            return tuple(found)
        listed = page.get("consumers") or []
        found += [consumer_facts(consumer) for consumer in listed]
        if not listed or len(found) >= page.get("total", 0):
            return tuple(found)
