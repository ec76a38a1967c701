"""Matches subjects as a nats-server does, and lists the subjects and calls of a deployment for tests of permissions."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.jetstream.logins.roles import PARTS_API, ROLES
from headrace.jetstream.subjects import REQUEST_CLASSES
from headrace.jetstream.topology import Topology

STREAM_CALLS = (
    "STREAM.CREATE",
    "STREAM.UPDATE",
    "STREAM.DELETE",
    "STREAM.INFO",
    "STREAM.PURGE",
    "STREAM.MSG.GET",
    "STREAM.MSG.DELETE",
    "STREAM.SNAPSHOT",
    "STREAM.RESTORE",
    "STREAM.PEER.REMOVE",
    "STREAM.PEER.EVACUATE",
    "STREAM.CANCEL_MOVE",
    "STREAM.LEADER.STEPDOWN",
    "CONSUMER.NAMES",
    "CONSUMER.LIST",
    "CONSUMER.CREATE",
    "DIRECT.GET",
)
CONSUMER_CALLS = (
    "CONSUMER.CREATE",
    "CONSUMER.DURABLE.CREATE",
    "CONSUMER.DELETE",
    "CONSUMER.INFO",
    "CONSUMER.MSG.NEXT",
    "CONSUMER.PAUSE",
    "CONSUMER.RESET",
    "CONSUMER.UNPIN",
    "CONSUMER.PEER.REMOVE",
    "CONSUMER.PEER.EVACUATE",
    "CONSUMER.LEADER.STEPDOWN",
)
PLAIN_CALLS = (
    "INFO",
    "STREAM.NAMES",
    "STREAM.LIST",
    "ACCOUNT.PURGE.x",
    "ACCOUNT.STREAM.MOVE.x.x",
    "ACCOUNT.STREAM.CANCEL_MOVE.x.x",
    "META.LEADER.STEPDOWN",
    "META.RESCUE",
    "SERVER.REMOVE",
    "SERVER.EVACUATE",
)


def matches(pattern: str, subject: str) -> bool:
    """Say whether a pattern covers a subject, in which wildcards stand for themselves."""
    wanted, given = pattern.split("."), subject.split(".")
    for at, token in enumerate(wanted):
        if token == ">":
            return len(given) > at
        if at >= len(given) or (token != "*" and token != given[at]):
            return False
    return len(wanted) == len(given)


def allowed(patterns: Iterable[str], subject: str) -> bool:
    """Say whether one of the patterns covers the subject."""
    return any(matches(pattern, subject) for pattern in patterns)


def overlap(one: str, other: str) -> bool:
    """Say whether there is a subject that both patterns cover."""
    mine, theirs = one.split("."), other.split(".")
    for a, b in zip(mine, theirs, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(mine) == len(theirs)


def core_subjects(topology: Topology, pool: str, tenant: str) -> list[str]:
    """Return a subject of each kind of the deployment, of this pool and tenant."""
    s = topology.subjects
    return [
        *(s.req(pool, request_class, tenant) for request_class in REQUEST_CLASSES),
        s.work(pool, "w1"),
        s.prefill(pool),
        s.prefill(pool, "w1"),
        s.job("m", tenant),
        s.result(tenant, "j1"),
        s.rsp(tenant, "j1"),
        s.job_events(tenant, "j1"),
        s.kv(pool, "w1"),
        s.route(pool),
        s.load(pool, "w1"),
        s.dlq(pool),
        s.out("i1"),
        s.events(pool),
        s.refused(pool),
        s.judge("i1"),
        s.spoken_by(pool, "w1").out("i1"),
        s.spoken_by(pool, "w1").judge("i1"),
        s.peer(pool, "w1"),
        s.control("w1"),
        s.operate_worker(pool, "w1"),
        s.quota("k", "tokens", 1),
        s.quota_open(),
        s.cancel(pool),
        s.cancel_jobs(),
        s.find(pool),
        s.audit(),
        s.audit_record(tenant),
        f"{s.prefix}.unheard.of",
        "other.deployment",
    ]


def stored_subjects(topology: Topology, pool: str) -> list[str]:
    """Return a subject of each bucket and object store, and the keys of members of this pool."""
    s = topology.subjects
    members = s.bucket("members")
    keys = [s.worker_key(pool, "w1"), s.router_key(pool, "r1"), s.ingress_key("i1"), f"snapshots.{pool}"]
    found = [f"$KV.{members}.{key}" for key in keys]
    state = s.bucket("state")
    found += [f"$KV.{state}.snapshot.{pool}", f"$KV.{state}.drained.w1", f"$KV.{state}.other"]
    found += [f"$KV.{bucket.name}.{pool}" for bucket in topology.buckets()]
    for store in (*topology.object_stores(), *topology.pool_stores(pool)):
        found += [f"$O.{store.name}.C.abc", f"$O.{store.name}.M.abc"]
    return found


def api_calls(topology: Topology, api: str = PARTS_API) -> list[str]:
    """Return every call of the JetStream API on every stream of the deployment, and the server's other subjects of a stream."""
    found = [f"{api}.{call}" for call in PLAIN_CALLS]
    pools = [store.stream() for pool in ("pool-a", "pool-b") for store in topology.pool_stores(pool)]
    for spec in (*topology.all_streams(), *pools):
        found += [f"{api}.{call}.{spec.name}" for call in STREAM_CALLS]
        found += [f"{api}.{call}.{spec.name}.c1" for call in CONSUMER_CALLS]
        found += [f"$JS.ACK.{spec.name}.c1.1.1.1.1.0", f"$JS.FC.{spec.name}.c1.x"]
        for subject in spec.subjects:
            found.append(f"{api}.CONSUMER.CREATE.{spec.name}.c1.{subject}")
            found.append(f"{api}.DIRECT.GET.{spec.name}.{subject.replace('>', 'x').replace('*', 'x')}")
    return found


def inboxes_of_all() -> list[str]:
    """Return an inbox of each role, one of another pool or tenant, and one of a client without a role."""
    return [*(f"_INBOX.{role}.{scope}.x.a.1" for role in ROLES for scope in ("_", "pool-a", "pool-b", "acme")), "_INBOX.x.a.1"]
