"""Describes what `headrace doctor` knows of the NATS server, the deployment and this machine, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.jetstream.provision import StreamPlan


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
