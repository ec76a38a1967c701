"""Facts for `headrace doctor` about this machine, the NATS server and the deployment, and how they are read."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.base.errors import CommandError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Inspect, Inspection
from headrace.broker.messages.members import WorkerMember
from headrace.commands.control import ask_all
from headrace.commands.info import versions
from headrace.jetstream.api import STREAM_NOT_FOUND, ApiError
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import AccessDenied, JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.provision import StreamPlan, differences, parse_time, wanted_config
from headrace.jetstream.specs import StreamSpec
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.workers.errors import EngineStartFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """A replica of a stream on another server. `lag` counts entries that it has not applied."""

    name: str
    current: bool
    offline: bool = False
    lag: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerFacts:
    """A consumer with its waiting and unacked messages, and its open pulls.

    `copies` counts the servers of a cluster that know it, 0 where that does not matter: without a cluster, or of one that ends
    with its reader.
    """

    name: str
    waiting: int = 0
    unacked: int = 0
    open_pulls: int = 0
    copies: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts:
    """A stream as the server has it. `max_bytes` is -1 without a cap. `one_copy`: it should have no more than one."""

    name: str
    storage: str = "file"
    messages: int = 0
    bytes: int = 0
    max_bytes: int = -1
    replicas: int = 1
    leader: str = ""
    peers: tuple[PeerFacts, ...] = ()
    one_copy: bool = False
    consumers: tuple[ConsumerFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountLimits:
    """Grants of JetStream to the account, in bytes and streams; -1 means no limit."""

    memory: int = -1
    storage: int = -1
    streams: int = -1
    used_memory: int = 0
    used_storage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoringFacts:
    """Settings of the server, from its monitoring port. Bytes; `sync_interval_s` is 0 when every write is synced."""

    max_memory: int
    max_storage: int
    sync_interval_s: float
    store_dir: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """The server as a client sees it. `skew_s`: the server's clock before ours, within `skew_bound_s` either way."""

    version: str
    cluster: str = ""
    max_payload: int = 0
    limits: AccountLimits = field(default_factory=AccountLimits)
    plans: tuple[StreamPlan, ...] = ()
    streams: tuple[StreamFacts, ...] = ()
    skew_s: float | None = None
    skew_bound_s: float = 0.0
    monitoring: MonitoringFacts | None = None
    denied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A worker with a lease. `answers` is False when it did not answer a question in time."""

    id: str
    pool: str
    model: str
    role: str
    engine: str = ""
    engine_version: str = ""
    host: str = ""
    handover: str = ""
    fleet: str = ""
    answers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFacts:
    """The live parts, and the requests that wait in each pool. `routers`: pool → number of routers."""

    workers: tuple[WorkerFacts, ...] = ()
    routers: Mapping[str, int] = field(default_factory=dict)
    ingresses: int = 0
    waiting: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Properties of this machine. Bytes; None where it could not be read."""

    data_dir: str
    data_free: int | None
    data_mode: int | None  # permission bits; None while the folder does not exist
    open_files: int
    shared_memory: int | None
    nats_server: str | None
    engines: Mapping[str, str | None] = field(default_factory=dict)  # installed engine → what it lacks, None if nothing


# Reads what matters of this machine, for `headrace doctor`. Imports no engine.


def read_machine(data_dir: Path) -> MachineFacts:
    """Return the facts of this machine. Reads, and changes nothing; takes well under a second."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        data_dir=str(data_dir),
        data_free=_free(data_dir),
        data_mode=data_dir.stat().st_mode & 0o7777 if data_dir.is_dir() else None,
        open_files=1 << 20 if soft == resource.RLIM_INFINITY else soft,
        shared_memory=_total(Path("/dev/shm")),  # noqa: S108  # its size is read
        nats_server=versions()["nats-server"],
        engines={name: lacks for name, check in _ENGINES.items() if (lacks := check()) != _ABSENT},
    )


_ABSENT = "absent"


def _vllm() -> str | None:
    from headrace.workers.vllm.settings import SETTINGS, check_compiler

    return _state("vllm", SETTINGS.check_packages, lambda: check_compiler({}, os.environ))


def _sglang() -> str | None:
    from headrace.workers.sglang.settings import SETTINGS

    return _state("sglang", SETTINGS.check_packages)


def _state(module: str, *checks: Callable[[], None]) -> str | None:
    """Return None for an engine that could start, `_ABSENT`, or what it lacks."""
    if find_spec(module) is None:
        return _ABSENT
    try:
        for check in checks:
            check()
    except EngineStartFailed as error:
        return str(error)
    return None


_ENGINES: dict[str, Callable[[], str | None]] = {"vllm": _vllm, "sglang": _sglang}


def _free(folder: Path) -> int | None:
    """Return the free bytes of the disk that holds a folder, or of the one on which it would be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _total(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


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


async def read_deployment(messaging: Messaging, names: Subjects) -> DeploymentFacts:
    """Return the parts that hold a lease, and how many requests wait in each pool. Raises a JetStreamError."""
    entries = await messaging.bucket(names.bucket("members")).entries(">")
    members, routers, ingresses = [], Counter[str](), 0
    for entry in entries:
        kind, _, rest = entry.key.partition(".")
        if kind == "worker":
            try:
                members.append(decode(WorkerMember, entry.value))
            except WireError:
                continue  # of another version, which the parts ignore too
        elif kind == "router":
            routers[rest.partition(".")[0]] += 1
        elif kind == "ingress":
            ingresses += 1
    members.sort(key=lambda member: member.worker)
    answers = await ask_all(messaging, names, [member.worker for member in members], Inspect(), Inspection)
    return DeploymentFacts(
        workers=tuple(_worker(member, answer is not None) for member, answer in zip(members, answers, strict=True)),
        routers=dict(routers),
        ingresses=ingresses,
        waiting=await _waiting(messaging, names),
    )


def _worker(member: WorkerMember, answers: bool) -> WorkerFacts:
    return WorkerFacts(
        id=member.worker,
        pool=member.pool,
        model=member.model,
        role=member.role,
        engine=member.engine,
        engine_version=member.engine_version,
        host=member.host,
        handover=member.handover,
        fleet=member.fleet,
        answers=answers,
    )


async def _waiting(messaging: Messaging, names: Subjects) -> dict[str, int]:
    waiting = Counter[str]()
    for kind in ("REQ", "MOVED"):
        try:
            counts = await messaging.subject_counts(names.stream(kind), ">")
        except JetStreamError:
            continue  # the stream is missing, which is a finding of its own
        for subject, count in counts.items():
            waiting[names.parse_req(subject).pool] += count
    return dict(waiting)
