"""Lists every stream, consumer, bucket and object store of a deployment as data; `headrace.jetstream.provision`
creates them.

**Moved requests have a stream of their own** (`MOVED`, subjects `<prefix>.req.*.re.*` and `<prefix>.req.*.rb.*`).  A
per-subject cap applies to all subjects of a stream alike, and a job that was accepted once and is moved must never be refused,
so it cannot share the capped `REQ`.  `request_stream` returns the stream of a class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.jetstream.ports import ConsumerSpec
from headrace.jetstream.specs import BucketSpec, ObjectStoreSpec, StreamSpec
from headrace.jetstream.subjects import MOVED_CLASSES, RequestClass, Subjects, is_token

MIB = 1024 * 1024
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
LONGEST_DEADLINE_S = 7 * DAY_S  # of a stored job, and the longest window of a batch
REQ_ACK_WAIT_S = 3.0
JOB_ACK_WAIT_S = 6.0
WORK_INACTIVE_S = 15 * 60.0

AUDIT = "AUDIT"
EMBEDDINGS = "embeddings"
POOL_STORES = (EMBEDDINGS,)  # object stores of each pool

# The streams whose dead letters Headrace keeps itself.
WORK_QUEUES = ("REQ", "MOVED", "WORK", "JOB", "PREFILL")


@dataclass(frozen=True, slots=True)
class Topology:
    """Streams and buckets that one deployment needs on the server. Caps count waiting and delivered, unacked messages.

    The server reserves the bytes when a stream is created: all of them together must fit into its `max_file_store`.
    """

    subjects: Subjects = field(default_factory=Subjects)
    replicas: int = 0  # copies in a cluster of servers; 0 leaves existing streams as they are
    tenant_cap: int = 10_000  # requests of one tenant waiting in one pool and class
    request_cap: int = 200_000
    request_bytes: int = 1024 * MIB
    worker_cap: int = 4096  # messages placed on one worker: a safety net, because routers track each worker's room themselves
    work_bytes: int = 1024 * MIB
    job_cap: int = 200_000  # jobs of one tenant waiting for one model
    job_bytes: int = 2048 * MIB
    result_bytes: int = 4096 * MIB
    rsp_bytes: int = 2048 * MIB
    prefill_cap: int = 4096
    prefill_bytes: int = 256 * MIB
    kv_bytes: int = 512 * MIB
    route_bytes: int = 256 * MIB
    dlq_bytes: int = 256 * MIB
    quota_bytes: int = 64 * MIB
    work_max_age_s: float = DAY_S
    job_max_age_s: float = 8 * DAY_S  # beyond the longest deadline of a job, `LONGEST_DEADLINE_S`
    request_max_age_s: float = 8 * DAY_S  # each has a TTL of its own; a job's request may wait until the job's deadline
    result_max_age_s: float = 16 * DAY_S  # beyond `job_max_age_s` and the longest batch window together
    route_max_age_s: float = 2 * DAY_S
    audit_bytes: int = (
        256 * MIB
    )  # records of requests: the oldest are removed; an operator may give more or less, as of the age
    audit_max_age_s: float = 30 * DAY_S
    spill_bytes: int = 4096 * MIB  # payloads too large for a message, of all tenants
    spill_max_age_s: float = 8 * DAY_S  # each has a TTL of its own
    stored_bytes: int = 1024 * MIB  # stored answers and items of conversations: the oldest are removed
    record_bytes: int = 128 * MIB  # what is listed of stored chats and conversations: the oldest are removed

    embedding_bytes: int = 1024 * MIB  # of media: the oldest are removed; an operator may give more or less
    embedding_max_age_s: float = HOUR_S

    def streams(self) -> tuple[StreamSpec, ...]:
        s, p = self.subjects, self.subjects.prefix
        return (
            self._queue(
                "REQ",
                (f"{p}.req.*.hi.*", f"{p}.req.*.std.*", f"{p}.req.*.batch.*"),
                "requests waiting for placement; the cap per subject is per pool, class and tenant",
                max_msgs_per_subject=self.tenant_cap,
                max_msgs=self.request_cap,
                max_bytes=self.request_bytes,
                max_age_s=self.request_max_age_s,
            ),
            self._queue(
                "MOVED",
                (f"{p}.req.*.re.*", f"{p}.req.*.rb.*"),
                "moved requests, never capped: ordinary ones are served first, batch requests before other batch requests",
                max_age_s=self.request_max_age_s,
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
                "JOB",
                (f"{p}.job.*.*",),
                "stored jobs: batch lines, jobs of publishers, background and durable responses",
                max_msgs_per_subject=self.job_cap,
                max_bytes=self.job_bytes,
                max_age_s=self.job_max_age_s,
                duplicate_window_s=120.0,
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
                replicas=self.replicas,
            ),
            StreamSpec(
                name=s.stream("RSP"),
                subjects=(f"{p}.rsp.*.*",),
                description="entries of jobs: takes, and rows and ends of durable streams",
                discard="new",
                max_bytes=self.rsp_bytes,
                max_age_s=self.result_max_age_s,
                allow_msg_ttl=True,  # a server cannot take it back from the stream of an older version
                replicas=self.replicas,
            ),
            StreamSpec(
                name=s.stream("RESULT"),
                subjects=(f"{p}.result.*.*",),
                description="results of jobs, one per job",
                discard="new",
                max_msgs_per_subject=1,
                discard_new_per_subject=True,
                max_bytes=self.result_bytes,
                max_age_s=self.result_max_age_s,
                replicas=self.replicas,
            ),
            StreamSpec(
                name=s.stream("QUOTA"),
                subjects=(f"{p}.quota.*.*.*",),
                description="what keys and tenants have used, by minute and day",
                max_msgs_per_subject=1,
                max_bytes=self.quota_bytes,
                max_age_s=2 * DAY_S,
                counts=True,
                replicas=self.replicas,
            ),
            StreamSpec(
                name=s.stream(AUDIT),
                subjects=(s.audit_records(),),
                description="what was asked, by whom, and what it cost, where frontends record it",
                max_bytes=self.audit_bytes,
                max_age_s=self.audit_max_age_s,
                duplicate_window_s=60.0,
                operators_size=True,
                on_demand=True,
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
            "files": "records of files and uploads",
            "keys": "API keys, hashed, and what they may do",
            "state": "snapshot pointers, leaders, records that outlive a lease",
        }
        records = BucketSpec(
            name=self.subjects.bucket("records"),
            description="stored chats and conversations of tenants, for lists and changes",
            discard="old",
            max_bytes=self.record_bytes,
            replicas=self.replicas,
        )
        # Leases must be renewed while the disk is full, and are worth nothing after a restart (docs/reliability.md).
        return (
            *(
                BucketSpec(
                    name=self.subjects.bucket(kind),
                    description=text,
                    storage="memory" if kind == "members" else "file",
                    replicas=self.replicas,
                )
                for kind, text in texts.items()
            ),
            records,
        )

    def object_stores(self) -> tuple[ObjectStoreSpec, ...]:
        texts = {
            "models": "tokenizer files and chat templates",
            "adapters": "LoRA adapters that were pushed into the deployment",
            "snapshots": "snapshots of the prefix index",
            "spill": "payloads too large for a message",
            "results": "results too large for a message",
        }
        ttls = {"spill": self.spill_max_age_s, "results": self.result_max_age_s}
        stored = ObjectStoreSpec(
            name=self.subjects.bucket("responses"),
            description="answers and items of conversations that clients may come back to",
            own_ttls=True,  # the TTL is a setting of the frontend that stores them
            discard="old",
            max_bytes=self.stored_bytes,
            replicas=self.replicas,
        )
        files = ObjectStoreSpec(
            name=self.subjects.bucket("files"),
            description="uploaded and result files",
            own_ttls=True,  # by purpose, or as the client asks
            discard="new",
            replicas=self.replicas,
        )
        return (
            *(
                ObjectStoreSpec(
                    name=self.subjects.bucket(kind),
                    description=text,
                    ttl_s=ttls.get(kind, 0.0),
                    own_ttls=kind == "spill",  # as long as the request may wait
                    max_bytes=self.spill_bytes if kind == "spill" else -1,
                    replicas=self.replicas,
                )
                for kind, text in texts.items()
            ),
            files,
            stored,
        )

    def pool_stores(self, pool: str) -> tuple[ObjectStoreSpec, ...]:
        """Return the object stores of a single pool, which are made on demand."""
        return (
            ObjectStoreSpec(
                name=self.subjects.pool_bucket(EMBEDDINGS, pool),
                description="what encoders made of media, for every worker of the pool with the same encoder",
                ttl_s=self.embedding_max_age_s,
                discard="old",
                max_bytes=self.embedding_bytes,
                operators_size=True,
                on_demand=True,
                replicas=1,  # what is lost is computed again
            ),
        )

    def pool_store(self, stream: str) -> StreamSpec | None:
        """Return the stream of a store of one pool by its name, None for another stream."""
        for kind in POOL_STORES:
            begin = f"OBJ_{self.subjects.pool_bucket(kind, '')}"
            if stream.startswith(begin) and is_token(pool := stream.removeprefix(begin)):
                return next(spec for one in self.pool_stores(pool) if (spec := one.stream()).name == stream)
        return None

    def all_streams(self) -> tuple[StreamSpec, ...]:
        """Return all streams, including those of buckets and object stores, but not those of single pools."""
        return (*self.streams(), *(b.stream() for b in self.buckets()), *(o.stream() for o in self.object_stores()))

    def audit(self) -> StreamSpec:
        return next(spec for spec in self.streams() if spec.name == self.subjects.stream(AUDIT))

    def embeddings(self, pool: str) -> StreamSpec:
        """Return the stream of a pool's object store of embeddings, which is made on demand."""
        return self.pool_stores(pool)[0].stream()

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
        # Not MSG_TERMINATED: the server reports that for every moved message, which is published again and deleted un-acked.
        return tuple(f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{self.subjects.stream(queue)}.*" for queue in WORK_QUEUES)


def request_stream(subjects: Subjects, request_class: RequestClass) -> str:
    return subjects.stream("MOVED" if request_class in MOVED_CLASSES else "REQ")


def request_consumer(subjects: Subjects, pool: str, request_class: RequestClass) -> ConsumerSpec:
    """Return the consumer that all routers (priority 0) and, without a router, workers (priority 9) of a pool share."""
    return ConsumerSpec(
        stream=request_stream(subjects, request_class),
        name=subjects.req_consumer(pool, request_class),
        filter_subjects=(subjects.req_filter(pool, request_class),),
        ack_wait_s=REQ_ACK_WAIT_S,
        max_ack_pending=65536,
        prioritized=True,
        description=f"requests of class {request_class}, pool {pool}",
    )


def job_consumer(subjects: Subjects, model_slug: str) -> ConsumerSpec:
    """Return the consumer of stored jobs that all carriers of a model share."""
    return ConsumerSpec(
        stream=subjects.stream("JOB"),
        name=subjects.job_consumer(model_slug),
        filter_subjects=(subjects.job_filter(model_slug),),
        ack_wait_s=JOB_ACK_WAIT_S,
        max_ack_pending=65536,
        description=f"stored jobs of {model_slug}",
    )


def work_consumer(subjects: Subjects, pool: str, worker: str, secret: str = "") -> ConsumerSpec:
    """Return the consumer of one worker. It expires when that worker has been gone for long; its messages stay.

    `secret`: the part of its name that only this worker knows.
    """
    return ConsumerSpec(
        stream=subjects.stream("WORK"),
        name=subjects.work_consumer(worker, secret),
        filter_subjects=(subjects.work(pool, worker),),
        ack_wait_s=REQ_ACK_WAIT_S,
        max_ack_pending=65536,
        inactive_threshold_s=WORK_INACTIVE_S,
        description=f"work of {worker}",
    )


def prefill_consumer(subjects: Subjects, pool: str, worker: str | None = None, secret: str = "") -> ConsumerSpec:
    """Return the consumer that the prefill workers of a pool share, or that of one worker.

    `secret`: the part of its name that only these workers know. The latter expires when that worker has been gone for long.
    """
    return ConsumerSpec(
        stream=subjects.stream("PREFILL"),
        name=subjects.prefill_consumer(pool, worker, secret),
        filter_subjects=(subjects.prefill(pool, worker),),
        ack_wait_s=REQ_ACK_WAIT_S,
        max_ack_pending=65536,
        inactive_threshold_s=None if worker is None else WORK_INACTIVE_S,
        description=f"prefill jobs of pool {pool}" if worker is None else f"prefill jobs for {worker}",
    )
