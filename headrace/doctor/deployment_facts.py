"""Reads the live parts of a deployment and the requests that wait, for `headrace doctor`."""

from __future__ import annotations

from collections import Counter

from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import Inspect, Inspection, WorkerMember
from headrace.commands.operating.control_client import ask_all
from headrace.doctor.facts import DeploymentFacts, WorkerFacts
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects


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
