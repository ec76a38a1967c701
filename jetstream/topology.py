"""Every stream, consumer, bucket and object store of a deployment, as data. `jetstream.manage` makes it so.

Two decisions that are not obvious:

* **Moved requests have a stream of their own** (`MOVED`, subjects `<prefix>.req.*.re.*`).  A per-subject cap applies to all
  subjects of a stream alike, and work that was accepted once and is moved must never be refused, so it cannot share the
  capped `REQ`.  `request_stream` says where a class lies.
* **All buckets keep one revision and write limit markers.**  With more revisions the server makes the marker's life a lower
  bound of every message TTL, which would stretch short leases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jetstream import wire
from jetstream.ports import ConsumerSpec
from jetstream.pull import GROUP
from jetstream.subjects import RequestClass, Subjects

TOPOLOGY_VERSION = "1"
MIB = 1024 * 1024
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

REQ_ACK_WAIT_S = 3.0
WORK_INACTIVE_S = 15 * 60.0
MARKER_TTL_S = 10.0
DUPLICATE_WINDOW_S = 30.0

# The streams whose dead letters are ours to keep.
WORK_QUEUES = ("REQ", "MOVED", "WORK", "BATCH", "PREFILL")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """A stream as data. -1 means no limit; a duration of 0 means for ever."""

    name: str
    subjects: tuple[str, ...]
    description: str
    retention: Literal["limits", "workqueue"] = "limits"
    storage: Literal["file", "memory"] = "file"
    discard: Literal["old", "new"] = "old"
    max_msgs: int = -1
    max_bytes: int = -1
    max_msgs_per_subject: int = -1
    max_msg_size: int = -1
    max_age_s: float = 0.0
    duplicate_window_s: float = DUPLICATE_WINDOW_S
    discard_new_per_subject: bool = False
    allow_direct: bool = True
    allow_msg_ttl: bool = False
    marker_ttl_s: float = 0.0
    allow_rollup_hdrs: bool = False
    deny_delete: bool = False
    no_ack: bool = False
    replicas: int = 1
    metadata: Mapping[str, str] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """As the server names it."""
        window_s = min(self.duplicate_window_s, self.max_age_s) if self.max_age_s else self.duplicate_window_s
        config: dict[str, Any] = {
            "name": self.name,
            "subjects": list(self.subjects),
            "description": self.description,
            "retention": self.retention,
            "storage": self.storage,
            "discard": self.discard,
            "max_consumers": -1,
            "max_msgs": self.max_msgs,
            "max_bytes": self.max_bytes,
            "max_msgs_per_subject": self.max_msgs_per_subject,
            "max_msg_size": self.max_msg_size,
            "max_age": wire.nanoseconds(self.max_age_s),
            "duplicate_window": wire.nanoseconds(window_s),
            "discard_new_per_subject": self.discard_new_per_subject,
            "allow_direct": self.allow_direct,
            "allow_msg_ttl": self.allow_msg_ttl,
            "allow_rollup_hdrs": self.allow_rollup_hdrs,
            "deny_delete": self.deny_delete,
            "no_ack": self.no_ack,
            "num_replicas": self.replicas,
            "metadata": {"owner": "headrace", "version": TOPOLOGY_VERSION, **self.metadata},
        }
        if self.marker_ttl_s:
            config["subject_delete_marker_ttl"] = wire.nanoseconds(self.marker_ttl_s)
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """A key-value bucket as data."""

    name: str
    description: str
    max_bytes: int = -1
    replicas: int = 1

    def stream(self) -> StreamSpec:
        return StreamSpec(
            name=f"KV_{self.name}",
            subjects=(f"$KV.{self.name}.>",),
            description=self.description,
            discard="new",
            max_msgs_per_subject=1,
            max_bytes=self.max_bytes,
            duplicate_window_s=120.0,
            allow_msg_ttl=True,
            marker_ttl_s=MARKER_TTL_S,
            allow_rollup_hdrs=True,
            deny_delete=True,
            replicas=self.replicas,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreSpec:
    """An object store as data. `ttl_s` 0 keeps objects for ever; with `own_ttls` each object may have a life of its own.

    `discard`: what happens when it is full, the new object is refused or the oldest make room.
    """

    name: str
    description: str
    ttl_s: float = 0.0
    own_ttls: bool = False
    discard: Literal["old", "new"] = "new"
    max_bytes: int = -1
    replicas: int = 1

    def stream(self) -> StreamSpec:
        return StreamSpec(
            name=f"OBJ_{self.name}",
            subjects=(f"$O.{self.name}.C.>", f"$O.{self.name}.M.>"),
            description=self.description,
            discard=self.discard,
            max_bytes=self.max_bytes,
            max_age_s=self.ttl_s,
            duplicate_window_s=120.0,
            allow_msg_ttl=self.own_ttls,
            allow_rollup_hdrs=True,
            replicas=self.replicas,
        )


@dataclass(frozen=True, slots=True)
class Topology:
    """What one deployment needs on the server. Caps count waiting and delivered, unacked messages.

    The server sets the bytes aside when a stream is made: all of them together must fit into its `max_file_store`.
    """

    subjects: Subjects = field(default_factory=Subjects)
    replicas: int = 1
    tenant_cap: int = 10_000  # requests of one tenant waiting in one pool and class
    request_cap: int = 200_000
    request_bytes: int = 1024 * MIB
    worker_cap: int = 4096  # placed on one worker: a safety net, routers keep each worker's room themselves
    work_bytes: int = 1024 * MIB
    batch_cap: int = 1_000_000
    batch_bytes: int = 2048 * MIB
    prefill_cap: int = 4096
    prefill_bytes: int = 256 * MIB
    kv_bytes: int = 512 * MIB
    route_bytes: int = 256 * MIB
    dlq_bytes: int = 256 * MIB
    request_max_age_s: float = HOUR_S
    work_max_age_s: float = DAY_S
    batch_max_age_s: float = 7 * DAY_S
    route_max_age_s: float = 2 * DAY_S
    response_max_age_s: float = HOUR_S
    spill_ttl_s: float = 2 * HOUR_S
    stored_bytes: int = 1024 * MIB  # answers of the Responses API: the oldest make room

    def streams(self) -> tuple[StreamSpec, ...]:
        s, p = self.subjects, self.subjects.prefix
        return (
            self._queue(
                "REQ",
                (f"{p}.req.*.hi.*", f"{p}.req.*.std.*"),
                "requests waiting for placement; the cap per subject is per pool, class and tenant",
                max_msgs_per_subject=self.tenant_cap,
                max_msgs=self.request_cap,
                max_bytes=self.request_bytes,
                max_age_s=self.request_max_age_s,
            ),
            self._queue(
                "MOVED", (f"{p}.req.*.re.*",), "moved requests: served first, never capped", max_age_s=self.request_max_age_s
            ),
            self._queue(
                "WORK",
                (f"{p}.work.*.*",),
                "requests placed on a worker",
                max_msgs_per_subject=self.worker_cap,
                max_bytes=self.work_bytes,
                max_age_s=self.work_max_age_s,
            ),
            self._queue(
                "BATCH",
                (f"{p}.batch.*.*",),
                "batch jobs",
                max_msgs_per_subject=self.batch_cap,
                max_bytes=self.batch_bytes,
                max_age_s=self.batch_max_age_s,
                duplicate_window_s=600.0,
            ),
            self._queue(
                "PREFILL",
                (f"{p}.prefill.*", f"{p}.prefill.*.*"),
                "prefill jobs of decode workers",
                max_msgs_per_subject=self.prefill_cap,
                max_bytes=self.prefill_bytes,
                max_age_s=120.0,
            ),
            StreamSpec(
                name=s.stream("KV"),
                subjects=(f"{p}.kv.*.*",),
                description="cache events of engines, one message per engine step",
                max_bytes=self.kv_bytes,
                max_age_s=HOUR_S,
                duplicate_window_s=1.0,
                replicas=self.replicas,
            ),
            StreamSpec(
                name=s.stream("ROUTE"),
                subjects=(f"{p}.route.*",),
                description="placements as they were made, for replay",
                max_bytes=self.route_bytes,
                max_age_s=self.route_max_age_s,
                duplicate_window_s=1.0,
                no_ack=True,
                replicas=self.replicas,
            ),
            StreamSpec(
                name=s.stream("LOAD"),
                subjects=(f"{p}.load.*.*",),
                description="the last load report of every worker",
                storage="memory",
                max_msgs_per_subject=1,
                max_age_s=10.0,
                duplicate_window_s=1.0,
                no_ack=True,
            ),
            StreamSpec(
                name=s.stream("RSP"),
                subjects=(f"{p}.rsp.*",),
                description="durable responses",
                max_age_s=self.response_max_age_s,
                allow_msg_ttl=True,
                replicas=self.replicas,
            ),
            StreamSpec(
                name=s.stream("RESULT"),
                subjects=(f"{p}.result.*",),
                description="results of batch jobs, one per job",
                discard="new",
                max_msgs_per_subject=1,
                discard_new_per_subject=True,
                max_age_s=self.batch_max_age_s,
                replicas=self.replicas,
            ),
            StreamSpec(
                name=s.stream("DLQ"),
                subjects=(f"{p}.dlq.>", *self._advisories()),
                description="dead letters, and the server's advisories about our own queues; the oldest make room",
                max_age_s=30 * DAY_S,
                max_bytes=self.dlq_bytes,
                replicas=self.replicas,
            ),
        )

    def buckets(self) -> tuple[BucketSpec, ...]:
        texts = {
            "members": "leases of workers, routers and ingresses",
            "models": "model cards",
            "batches": "state of batches",
            "state": "snapshot pointers, leaders, records that outlive a lease",
        }
        return tuple(BucketSpec(name=self.subjects.bucket(k), description=t, replicas=self.replicas) for k, t in texts.items())

    def object_stores(self) -> tuple[ObjectStoreSpec, ...]:
        texts = {
            "models": "tokenizer files and chat templates",
            "snapshots": "snapshots of the prefix index",
            "files": "uploaded and result files",
            "spill": "payloads too large for a message",
        }
        stored = ObjectStoreSpec(
            name=self.subjects.bucket("responses"),
            description="answers of the Responses API that clients may come back to",
            own_ttls=True,  # how long is a setting of the frontend that stores them
            discard="old",
            max_bytes=self.stored_bytes,
            replicas=self.replicas,
        )
        return (
            *(
                ObjectStoreSpec(
                    name=self.subjects.bucket(kind),
                    description=text,
                    ttl_s=self.spill_ttl_s if kind == "spill" else 0.0,
                    replicas=self.replicas,
                )
                for kind, text in texts.items()
            ),
            stored,
        )

    def all_streams(self) -> tuple[StreamSpec, ...]:
        """Everything, with the streams under buckets and object stores."""
        return (*self.streams(), *(b.stream() for b in self.buckets()), *(o.stream() for o in self.object_stores()))

    def _queue(self, kind: str, subjects: tuple[str, ...], description: str, **limits: Any) -> StreamSpec:
        return StreamSpec(
            name=self.subjects.stream(kind),
            subjects=subjects,
            description=description,
            retention="workqueue",
            discard="new",
            discard_new_per_subject="max_msgs_per_subject" in limits,
            allow_msg_ttl=True,
            replicas=self.replicas,
            **limits,
        )

    def _advisories(self) -> tuple[str, ...]:
        # Not MSG_TERMINATED: the server says that of every message that is moved (published again, then deleted un-acked).
        return tuple(f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{self.subjects.stream(queue)}.*" for queue in WORK_QUEUES)


def request_stream(subjects: Subjects, request_class: RequestClass) -> str:
    """The stream in which requests of this class lie."""
    return subjects.stream("MOVED" if request_class == "re" else "REQ")


def request_consumer(subjects: Subjects, pool: str, request_class: RequestClass) -> ConsumerSpec:
    """Shared by all routers (priority 0) and, without a router, workers (priority 9) of a pool."""
    return ConsumerSpec(
        stream=request_stream(subjects, request_class),
        name=subjects.req_consumer(pool, request_class),
        filter_subjects=(subjects.req_filter(pool, request_class),),
        ack_wait_s=REQ_ACK_WAIT_S,
        max_ack_pending=65536,
        prioritized=True,
        description=f"requests of class {request_class}, pool {pool}",
    )


def work_consumer(subjects: Subjects, pool: str, worker: str) -> ConsumerSpec:
    """Read by its worker alone. Goes away by itself when that worker has been gone for long; its messages stay."""
    return ConsumerSpec(
        stream=subjects.stream("WORK"),
        name=subjects.work_consumer(worker),
        filter_subjects=(subjects.work(pool, worker),),
        ack_wait_s=REQ_ACK_WAIT_S,
        max_ack_pending=65536,
        inactive_threshold_s=WORK_INACTIVE_S,
        description=f"work of {worker}",
    )


def prefill_consumer(subjects: Subjects, pool: str, worker: str | None = None) -> ConsumerSpec:
    """Shared by the prefill workers of a pool, or one worker's own, which goes away when that worker has been gone for long."""
    return ConsumerSpec(
        stream=subjects.stream("PREFILL"),
        name=subjects.prefill_consumer(pool, worker),
        filter_subjects=(subjects.prefill(pool, worker),),
        ack_wait_s=REQ_ACK_WAIT_S,
        max_ack_pending=65536,
        inactive_threshold_s=None if worker is None else WORK_INACTIVE_S,
        description=f"prefill jobs of pool {pool}" if worker is None else f"prefill jobs for {worker}",
    )


def consumer_config(spec: ConsumerSpec) -> dict[str, Any]:
    """As the server names it."""
    config: dict[str, Any] = {
        "name": spec.name,
        "durable_name": spec.name,
        "description": spec.description,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "replay_policy": "instant",
        "ack_wait": wire.nanoseconds(spec.ack_wait_s),
        "max_deliver": spec.max_deliver,
        "max_ack_pending": spec.max_ack_pending,
        "max_waiting": spec.max_waiting,
        "mem_storage": spec.mem_storage,
        "num_replicas": 1 if spec.mem_storage else 0,
        "metadata": {"owner": "headrace", "version": TOPOLOGY_VERSION, **spec.metadata},
    }
    if len(spec.filter_subjects) == 1:
        config["filter_subject"] = spec.filter_subjects[0]
    else:
        config["filter_subjects"] = list(spec.filter_subjects)
    if spec.inactive_threshold_s is not None:
        config["inactive_threshold"] = wire.nanoseconds(spec.inactive_threshold_s)
    if spec.prioritized:
        config["priority_groups"] = [GROUP]
        config["priority_policy"] = "prioritized"
    return config
