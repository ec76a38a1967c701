"""Checks the running deployment: parts that are missing or silent, work without an owner, and pools that mix engines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from headrace.broker.messages.members import HELPERS
from headrace.doctor.facts import DeploymentFacts, StreamFacts, WorkerFacts
from headrace.doctor.findings import Finding, error, ok, warning
from headrace.jetstream.subjects import Subjects


def check_deployment(facts: DeploymentFacts, streams: Sequence[StreamFacts], names: Subjects) -> Iterator[Finding]:
    """Yield a finding for each kind of part, and for each piece of work that has no owner."""
    yield from _parts(facts)
    yield from _silent(facts.workers)
    yield from _waiting(facts)
    yield from _pools(facts.workers)
    yield from _handover(facts.workers)
    yield from _ownerless(facts.workers, streams, names)


def _parts(facts: DeploymentFacts) -> Iterator[Finding]:
    workers, routers = len(facts.workers), sum(facts.routers.values())
    if facts.ingresses:
        yield ok("deployment.frontends", _count(facts.ingresses, "frontend"))
    else:
        yield warning("deployment.frontends", "no frontend serves HTTP", "start one: headrace frontend")
    if workers:
        yield ok("deployment.workers", f"{_count(workers, 'worker')} in {_count(len({w.pool for w in facts.workers}), 'pool')}")
    else:
        yield error("deployment.workers", "no worker serves: requests wait, then get 503", "start one: headrace worker")
    without = sorted({w.model for w in facts.workers if not facts.routers.get(w.pool)})
    if without:
        yield warning(
            "deployment.routers",
            f"no router serves {', '.join(without)}: workers place requests on themselves, without looking at caches",
            "start one: headrace router",
        )
    elif workers:
        yield ok("deployment.routers", f"{_count(routers, 'router')} for all pools")


def _silent(workers: Sequence[WorkerFacts]) -> Iterator[Finding]:
    silent = [w.id for w in workers if not w.answers]
    if silent:
        yield error(
            "deployment.silent",
            f"with a lease and without an answer: {', '.join(silent)}",
            "the process stands still, or this login may not ask it; its log says more",
        )


def _waiting(facts: DeploymentFacts) -> Iterator[Finding]:
    serving = {w.pool for w in facts.workers if w.role not in HELPERS}
    for pool, count in sorted(facts.waiting.items()):
        if count and pool not in serving:
            yield error(
                "deployment.waiting",
                f"{_count(count, 'request')} of pool {pool} wait and no worker serves it",
                "start a worker of this model, or drop them: headrace streams purge REQ --subject …",
            )


def _pools(workers: Sequence[WorkerFacts]) -> Iterator[Finding]:
    engines: defaultdict[tuple[str, str], set[str]] = defaultdict(set)  # of two fleets they may differ
    for worker in workers:
        engines[worker.pool, worker.fleet].add(f"{worker.engine} {worker.engine_version}".strip())
    for (pool, fleet), found in sorted(engines.items()):
        if len(found) > 1:
            name = f"fleet {fleet} of pool {pool}" if fleet else f"pool {pool}"
            yield warning(
                "deployment.engines",
                f"{name} mixes {', '.join(sorted(found))}",
                "an answer that moves between them may not continue exactly: finish the upgrade, or use two pools",
            )


def _handover(workers: Sequence[WorkerFacts]) -> Iterator[Finding]:
    roles: defaultdict[str, defaultdict[str, list[WorkerFacts]]] = defaultdict(lambda: defaultdict(list))
    for worker in workers:
        roles[worker.pool][worker.role].append(worker)
    for pool, by_role in sorted(roles.items()):
        prefill, decode = by_role["prefill"], by_role["decode"]
        if prefill and not decode and not by_role["aggregated"]:
            yield error(
                "deployment.roles",
                f"pool {pool} has prefill workers only",
                "start one: headrace worker --role decode",
            )
        if decode and not prefill:
            yield warning(
                "deployment.roles", f"pool {pool} has no prefill worker: decode workers compute prompts themselves", "start one"
            )
        methods = {w.handover for w in (*prefill, *decode)}
        if prefill and decode and len(methods) > 1:
            told = ", ".join(sorted(method or "none" for method in methods))
            yield warning(
                "deployment.handover",
                f"workers of pool {pool} transfer KV blocks in different ways: {told}",
                "prompts are computed twice between them: give all the same transfer settings",
            )


def _ownerless(workers: Sequence[WorkerFacts], streams: Sequence[StreamFacts], names: Subjects) -> Iterator[Finding]:
    live = {worker.id for worker in workers}
    work = next((s for s in streams if s.name == names.stream("WORK")), None)
    lost = [c for c in (work.consumers if work else ()) if names.work_consumer_owner(c.name) not in live]
    held = [c for c in lost if c.waiting or c.unacked]
    if held:
        told = ", ".join(f"{c.name} ({c.waiting + c.unacked})" for c in held)
        yield error(
            "deployment.owners",
            f"placed requests of workers that are gone: {told}",
            "routers and workers move them within seconds; if they stay, no part of the pool is live",
        )
    elif lost:
        yield ok("deployment.owners", f"{_count(len(lost), 'empty consumer')} of earlier workers, which the server removes")
    else:
        yield ok("deployment.owners", "every consumer of placed work has a live worker")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
