"""Streams, consumers and buckets on the server: creates and updates them from a `Topology`, and reports their state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import structlog

from headrace.jetstream import wire
from headrace.jetstream.api import NOT_READY, OUT_OF_RESOURCES, STREAM_IN_USE, STREAM_NOT_FOUND, TOO_FEW_SERVERS, ApiError
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import AccessDenied, DiskFull, JetStreamError, RequestTimeout, TooFewServers, TopologyError
from headrace.jetstream.specs import StreamSpec
from headrace.jetstream.topology import Topology

log = structlog.get_logger(__name__)

OPERATOR_S = 5.0  # how long a stream is waited for that only an operator's login may make
ELECTION_S = 20.0  # how long a cluster may take to choose the leader of a stream, or to have its servers together
LOOK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class FieldChange:
    name: str
    current: Any
    wanted: Any


@dataclass(frozen=True, slots=True)
class StreamPlan:
    stream: str
    action: str  # "create", "update" or "keep"
    changes: tuple[FieldChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatus:
    """State of a consumer: messages that wait for it, and messages delivered but not acked."""

    name: str
    waiting_messages: int
    ack_pending: int
    redelivered: int
    open_pulls: int
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatus:
    """State of a stream. `oldest_age_s` is None when it is empty."""

    stream: str
    exists: bool
    description: str = ""
    messages: int = 0
    bytes: int = 0
    subjects: int = 0
    first_seq: int = 0
    last_seq: int = 0
    oldest_age_s: float | None = None
    consumers: tuple[ConsumerStatus, ...] = field(default=())


async def ensure_topology(connection: Connection, topology: Topology) -> None:
    """Create missing streams, but for those on demand, and update different ones. Several processes may do so at once.

    Raises TopologyError, which names the stream, TooFewServers when a cluster has no room for the copies, DiskFull when the
    server cannot reserve the bytes, and RequestTimeout for a stream that has no leader for long.
    """
    await ensure_streams(connection, await _all_there_are(connection, topology))


async def ensure_on_demand(connection: Connection, spec: StreamSpec) -> None:
    if await _info(connection, spec.name) is None:
        await ensure_streams(connection, [replace(spec, on_demand=False)])


async def pool_stores(connection: Connection, topology: Topology) -> list[StreamSpec]:
    """Return the streams of the object stores of single pools that there are."""
    found: list[StreamSpec] = []
    offset = 0
    while True:
        page = await connection.api.call("STREAM.NAMES", {"offset": offset})
        names: list[str] = page.get("streams") or []
        found += [spec for name in names if (spec := topology.pool_store(name)) is not None]
        offset += len(names)
        if not names or offset >= page.get("total", 0):
            return found


async def _all_there_are(connection: Connection, topology: Topology) -> list[StreamSpec]:
    return [*topology.all_streams(), *await pool_stores(connection, topology)]


async def keep_stream(
    connection: Connection, stream: str, *, max_age_s: float | None, max_bytes: int | None
) -> tuple[float, int]:
    """Change the age or size limit of a stream; None leaves it.

    Returns both as they are now, seconds and bytes. Raises TopologyError.
    """
    info = await _info(connection, stream)
    if info is None:
        raise TopologyError(f"there is no stream {stream}")
    changed = {} if max_age_s is None else {"max_age": wire.nanoseconds(max_age_s)}
    changed |= {} if max_bytes is None else {"max_bytes": max_bytes}
    try:
        answer = await connection.api.call(f"STREAM.UPDATE.{stream}", {**info["config"], **changed})
    except ApiError as error:
        raise TopologyError(f"{stream} cannot be changed: {error}") from None
    return answer["config"]["max_age"] / 1e9, answer["config"]["max_bytes"]


async def ensure_streams(connection: Connection, specs: Iterable[StreamSpec]) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ensured_in_time(connection, spec)) for spec in specs]
    for task in tasks:
        if (error := task.result()) is not None:
            raise error


async def plan(connection: Connection, topology: Topology) -> list[StreamPlan]:
    """Return the changes that `ensure_topology` would make, field by field. Changes no stream."""
    plans = []
    for spec in await _all_there_are(connection, topology):
        info = await _info(connection, spec.name)
        if info is None:
            if not spec.on_demand:
                plans.append(StreamPlan(spec.name, "create"))
            continue
        changes = differences(info["config"], wanted_config(spec, info))
        plans.append(StreamPlan(spec.name, "update" if changes else "keep", changes))
    return plans


async def status(connection: Connection, topology: Topology) -> list[StreamStatus]:
    """Return depth, age, redeliveries and consumers of every stream, those of single pools too."""
    found = []
    for spec in await _all_there_are(connection, topology):
        info = await _info(connection, spec.name)
        if info is None and spec.on_demand:
            continue
        if info is None:
            found.append(StreamStatus(stream=spec.name, exists=False, description=spec.description))
            continue
        state = info["state"]
        found.append(
            StreamStatus(
                stream=spec.name,
                exists=True,
                description=spec.description,
                messages=state["messages"],
                bytes=state["bytes"],
                subjects=state.get("num_subjects", 0),
                first_seq=state["first_seq"],
                last_seq=state["last_seq"],
                oldest_age_s=_age_s(state, info.get("ts")) if state["messages"] else None,
                consumers=await _consumers(connection, spec.name),
            )
        )
    return found


async def bucket_copies(connection: Connection, bucket: str) -> int:
    """Return the number of copies that a cluster keeps of a bucket, 1 without a cluster. Raises TopologyError."""
    info = await _info(connection, f"KV_{bucket}")
    if info is None:
        raise TopologyError(f"there is no bucket {bucket}")
    return int(info["config"].get("num_replicas", 1))


async def purge(connection: Connection, stream: str, *, subject: str | None = None) -> int:
    """Remove all messages of a stream, or those of one subject or pattern. Returns their number. Raises TopologyError."""
    try:
        answer = await connection.api.call(f"STREAM.PURGE.{stream}", {"filter": subject} if subject else None)
    except ApiError as error:
        raise TopologyError(f"{stream} cannot be purged: {error}") from None
    return int(answer.get("purged", 0))


async def remove_topology(connection: Connection, topology: Topology) -> None:
    for spec in await _all_there_are(connection, topology):
        try:
            await connection.api.call(f"STREAM.DELETE.{spec.name}")
        except ApiError as error:
            if error.err_code != STREAM_NOT_FOUND:
                raise TopologyError(f"{spec.name} cannot be deleted: {error}") from None


def differences(current: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[FieldChange, ...]:
    """Return the fields of `wanted` that differ in `current`, as the server reports it.

    Fields that the server leaves out when they are empty count as empty, and metadata of other programs is left alone.
    """
    changes = []
    for name, value in wanted.items():
        have = current.get(name)
        if name == "metadata":
            have = {k: v for k, v in (have or {}).items() if k in value}
        if name == "subjects":
            have, value = sorted(have or []), sorted(value)
        if have != value and (have or value):
            changes.append(FieldChange(name, have, value))
    return tuple(changes)


async def _ensured_in_time(connection: Connection, spec: StreamSpec) -> JetStreamError | None:
    """Make or update a stream; waits while a cluster has no leader or too few servers."""
    deadline = asyncio.get_running_loop().time() + ELECTION_S
    while True:
        try:
            error = await _ensured(connection, spec)
        except JetStreamError as raised:
            error = raised
        passing = isinstance(error, RequestTimeout | TooFewServers) and error.retriable
        if not passing or asyncio.get_running_loop().time() >= deadline:
            return error
        await asyncio.sleep(LOOK_AGAIN_S)


async def _ensured(connection: Connection, spec: StreamSpec) -> JetStreamError | None:
    """Make or update a stream. A login that may not do so waits a while for another process that does.

    A login that asks a steward for its consumers does not try either, except for streams on demand.
    """
    deadline = asyncio.get_running_loop().time() + OPERATOR_S
    if spec.on_demand and await _info(connection, spec.name) is None:
        return None
    while not await _is_right(connection, spec):
        why = "the steward or `headrace up` makes it"
        if not connection.api.steward or connection.api.is_asked(f"STREAM.CREATE.{spec.name}"):
            try:
                return await _made(connection, spec)
            except AccessDenied as error:
                why = str(error)
        if asyncio.get_running_loop().time() >= deadline:
            return TopologyError(
                f"stream {spec.name} is missing or differs, and this login may not change it ({why}): "
                "run `headrace streams apply` as the operator"
            )
        await asyncio.sleep(LOOK_AGAIN_S)
    return None


async def _is_right(connection: Connection, spec: StreamSpec) -> bool:
    info = await _info(connection, spec.name)
    return info is not None and not differences(info["config"], wanted_config(spec, info))


def wanted_config(spec: StreamSpec, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an existing stream: size, age and copies stay the operator's where the spec says so."""
    config = spec.config()
    if spec.operators_size:
        config |= {name: info["config"][name] for name in ("max_bytes", "max_age")}
    if not spec.replicas:
        config["num_replicas"] = info["config"].get("num_replicas", 1)
    return config


async def _made(connection: Connection, spec: StreamSpec) -> JetStreamError | None:
    try:
        await connection.api.call(f"STREAM.CREATE.{spec.name}", spec.config())
    except ApiError as error:
        if error.err_code != STREAM_IN_USE:
            if error.err_code in TOO_FEW_SERVERS and spec.replicas > 1:
                return _too_few(spec, error)
            if error.err_code in OUT_OF_RESOURCES:
                return DiskFull(f"the server has no room for stream {spec.name} of {spec.max_bytes} bytes: {error.description}")
            return _no_leader(error) or TopologyError(f"stream {spec.name} cannot be created: {error}")
    else:
        return None
    try:
        if spec.storage == "memory" and await _moved_to_memory(connection, spec):
            return None
        info = await _info(connection, spec.name)
        config = spec.config() if info is None else wanted_config(spec, info)
        await connection.api.call(f"STREAM.UPDATE.{spec.name}", config)
    except ApiError as error:
        if error.err_code in TOO_FEW_SERVERS:
            return _too_few(spec, error)
        return _no_leader(error) or TopologyError(f"stream {spec.name} cannot be updated: {error}")
    except TopologyError as error:
        return TopologyError(f"stream {spec.name} cannot be updated: {error}")
    return None


def _no_leader(error: ApiError) -> RequestTimeout | None:
    return RequestTimeout(f"the NATS cluster is not ready: {error}") if error.err_code in NOT_READY else None


def _too_few(spec: StreamSpec, error: ApiError) -> TooFewServers:
    failure = TooFewServers(
        f"stream {spec.name} should have {spec.replicas} copies, and the NATS cluster has fewer servers that can take one: "
        f"start the others, or give a smaller nats.replicas ({error.description})"
    )
    failure.retriable = error.err_code in NOT_READY  # not where there is no cluster at all
    return failure


async def _moved_to_memory(connection: Connection, spec: StreamSpec) -> bool:
    """Recreate a file stream in memory, at the same cost as a restart.

    Returns False when it is in memory already. Raises ApiError.
    """
    info = await _info(connection, spec.name)
    if info is not None and info["config"]["storage"] == spec.storage:
        return False
    if info is not None:
        log.warning("stream.made_again", stream=spec.name, reason="it was kept in files and is now kept in memory")
        with contextlib.suppress(ApiError):  # another process was first; what else fails is seen below
            await connection.api.call(f"STREAM.DELETE.{spec.name}")
    await connection.api.call(f"STREAM.CREATE.{spec.name}", spec.config())
    return True


async def _info(connection: Connection, stream: str) -> dict[str, Any] | None:
    try:
        return await connection.api.call(f"STREAM.INFO.{stream}")
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return None
        raise _no_leader(error) or TopologyError(f"{stream} cannot be looked at: {error}") from None


async def _consumers(connection: Connection, stream: str) -> tuple[ConsumerStatus, ...]:
    found: list[ConsumerStatus] = []
    while True:
        page = await connection.api.call(f"CONSUMER.LIST.{stream}", {"offset": len(found)})
        found += [
            ConsumerStatus(
                name=c["name"],
                waiting_messages=c.get("num_pending", 0),
                ack_pending=c.get("num_ack_pending", 0),
                redelivered=c.get("num_redelivered", 0),
                open_pulls=c.get("num_waiting", 0),
                paused=bool(c.get("paused", False)),
            )
            for c in page.get("consumers") or []
        ]
        if not page.get("consumers") or len(found) >= page.get("total", 0):
            return tuple(sorted(found, key=lambda c: c.name))


def _age_s(state: Mapping[str, Any], server_time: str | None) -> float:
    now = parse_time(server_time) if server_time else datetime.now(UTC)
    return max(0.0, (now - parse_time(state["first_ts"])).total_seconds())


def parse_time(text: str) -> datetime:
    """Parse the server's RFC 3339 time. It has up to nanoseconds, of which Python keeps microseconds."""
    return datetime.fromisoformat(text)
