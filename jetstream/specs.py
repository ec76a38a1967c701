"""Describes streams, buckets and object stores as data, and translates streams and consumers to the server's field names.

**All buckets keep one revision and write limit markers.**  With more revisions the server makes the marker's life a lower
bound of every message TTL, which would stretch short leases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.jetstream import wire
from headrace.jetstream.ports import ConsumerSpec
from headrace.jetstream.pull import GROUP

TOPOLOGY_VERSION = "1"
MARKER_TTL_S = 10.0
DUPLICATE_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """A stream as data. -1 means no limit; a duration of 0 means no limit."""

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
    operators_size: bool = False  # `max_bytes` and age are for the beginning: what an operator makes of them is left alone
    on_demand: bool = False  # made by the first process that uses it, because most deployments have no use for it
    counts: bool = False  # messages are additions to a number per subject; nats-server 2.12 or newer, else they are just stored
    replicas: int = 0  # copies in a cluster of servers; 0 for one at first, and whatever its operator makes of that
    metadata: Mapping[str, str] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
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
            "num_replicas": self.replicas or 1,
            "metadata": {"owner": "headrace", "version": TOPOLOGY_VERSION, **self.metadata},
        }
        if self.counts:
            config["allow_msg_counter"] = True
        if self.marker_ttl_s:
            config["subject_delete_marker_ttl"] = wire.nanoseconds(self.marker_ttl_s)
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """A key-value bucket as data. One in memory is empty after each restart of the server.

    `discard`: the policy of a full bucket, which refuses the new value or removes the oldest ones.
    """

    name: str
    description: str
    storage: Literal["file", "memory"] = "file"
    discard: Literal["old", "new"] = "new"
    max_bytes: int = -1
    replicas: int = 0

    def stream(self) -> StreamSpec:
        return StreamSpec(
            name=f"KV_{self.name}",
            subjects=(f"$KV.{self.name}.>",),
            description=self.description,
            discard=self.discard,
            max_msgs_per_subject=1,
            max_bytes=self.max_bytes,
            storage=self.storage,
            duplicate_window_s=120.0,
            allow_msg_ttl=True,
            marker_ttl_s=MARKER_TTL_S,
            allow_rollup_hdrs=True,
            deny_delete=True,
            replicas=self.replicas,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreSpec:
    """An object store as data. `ttl_s` 0 keeps objects without limit; with `own_ttls` each object may have a shorter one.

    `discard`: the policy of a full store, which refuses the new object or removes the oldest ones.
    """

    name: str
    description: str
    ttl_s: float = 0.0
    own_ttls: bool = False
    discard: Literal["old", "new"] = "new"
    max_bytes: int = -1
    operators_size: bool = False
    on_demand: bool = False
    replicas: int = 0

    def stream(self) -> StreamSpec:
        return StreamSpec(
            name=f"OBJ_{self.name}",
            subjects=(f"$O.{self.name}.C.>", f"$O.{self.name}.M.>"),
            description=self.description,
            discard=self.discard,
            max_bytes=self.max_bytes,
            operators_size=self.operators_size,
            on_demand=self.on_demand,
            max_age_s=self.ttl_s,
            duplicate_window_s=120.0,
            allow_msg_ttl=self.own_ttls,
            allow_rollup_hdrs=True,
            replicas=self.replicas,
        )


def consumer_config(spec: ConsumerSpec) -> dict[str, Any]:
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
        "num_replicas": 0,  # as many as its stream has, and more when that gets more
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
