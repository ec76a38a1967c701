"""The workers of a pool as their leases tell, handed on to the scheduler; and which of them say nothing of their caches.

A worker whose engine cannot publish cache events says so in its lease.  One that promises them and then serves request after
request without a single event is found out here.  Either way its cache is guessed from placements until an event comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from headrace.broker.membership.members import Members
from headrace.broker.messages import JobEvent, WorkerMember
from headrace.router.index.types import CacheView
from headrace.router.placement.types import WorkerInfo
from headrace.router.session import metrics
from headrace.router.session.ports import CacheFeed, Scheduling
from headrace.router.settings import SessionOptions

log = structlog.get_logger()

REMOTE_LIMIT = 20_000  # requests remembered


def worker_info(member: WorkerMember, *, kv_events: bool) -> WorkerInfo:
    """A lease in the scheduler's words. `kv_events`: what it really does, which may be less than it promised."""
    return WorkerInfo(
        worker=member.worker,
        slots=member.slots,
        blocks=member.blocks,
        block_size=member.block_size,
        step_tokens=member.step_tokens,
        draining=member.draining,
        labels=frozenset(member.labels),
        adapters=frozenset(member.adapters),
        kv_events=kv_events,
        epoch=member.epoch,
        role=member.role,
        handover=member.handover,
    )


@dataclass(slots=True)
class _Known:
    member: WorkerMember
    approximate: bool
    heard: tuple[int, int] | None = None  # the last cache event of it that counted
    silent_prefills: int = 0
    silent_since_s: float = 0.0


@dataclass(slots=True)
class Roster:
    """Keeps the scheduler told who is there, and the index who is silent."""

    pool: str
    members: Members
    scheduler: Scheduling
    view: CacheView | None
    caches: CacheFeed | None
    options: SessionOptions
    _known: dict[str, _Known] = field(default_factory=dict)
    _remote: dict[str, None] = field(default_factory=dict)  # requests whose prompts other workers compute

    def refresh(self, now_s: float) -> bool:
        """Compare with the leases. True when something has changed."""
        live = self.members.workers(self.pool)
        changed = False
        for worker in [name for name in self._known if name not in live]:
            del self._known[worker]
            self.scheduler.remove_worker(worker, now_s)
            changed = True
        for worker, member in live.items():
            known = self._known.get(worker)
            if known is not None and known.member == member:
                continue
            self._put(member, known, now_s)
            changed = True
        if changed:
            serving = sum(known.member.serves for known in self._known.values())
            metrics.WORKERS.labels(self.pool).set(serving)
            metrics.PREFILL_WORKERS.labels(self.pool).set(len(self._known) - serving)
            self._count()
        return changed

    def _put(self, member: WorkerMember, known: _Known | None, now_s: float) -> None:
        if known is None:
            heard = self.caches is not None and self.caches.known(member.worker) is not None
            known = self._known[member.worker] = _Known(member, approximate=not member.kv_events and not heard)
            if known.approximate:
                self._say(member.worker, "its engine publishes no cache events")
            self._tell_view(known)
        elif known.member.role != member.role:
            log.info("worker.role", worker=member.worker, pool=self.pool, role=member.role, before=known.member.role)
        known.member = member
        self.scheduler.put_worker(worker_info(member, kv_events=not known.approximate), now_s)

    def on_event(self, event: JobEvent, now_s: float) -> None:
        """A worker that computes prompts and never says what it keeps of them publishes no events. One that got its blocks from
        a prefill worker has computed nothing."""
        if event.kind == "placed" and event.prefill:
            self._remote[event.id] = None
            if len(self._remote) > REMOTE_LIMIT:
                del self._remote[next(iter(self._remote))]
            return
        if event.kind == "placed" or event.kind == "started":
            return
        if event.id in self._remote:
            del self._remote[event.id]
            return
        if event.kind != "prefilled" or self.caches is None:
            return
        known = self._known.get(event.worker)
        if known is None or known.approximate or event.uncached < 2 * known.member.block_size or not known.member.block_size:
            return
        heard = self.caches.known(event.worker)
        if heard != known.heard or not known.silent_prefills:
            known.heard, known.silent_prefills, known.silent_since_s = heard, 0, now_s
        known.silent_prefills += 1
        if known.silent_prefills <= self.options.silent_prefills or now_s - known.silent_since_s < self.options.silent_s:
            return
        known.approximate = True
        self.caches.distrust(event.worker)
        self._tell_view(known)
        self.scheduler.put_worker(worker_info(known.member, kv_events=False), now_s)
        self._say(event.worker, f"{known.silent_prefills} prefills and no cache event")
        self._count()

    def look(self, now_s: float) -> None:
        """An event of a worker whose cache was guessed makes it exact: the feed has told the view already."""
        for worker, known in self._known.items():
            if known.approximate and self.caches is not None and self.caches.known(worker) is not None:
                known.approximate = False
                known.silent_prefills = 0
                self.scheduler.put_worker(worker_info(known.member, kv_events=True), now_s)
                log.info("worker.exact", worker=worker, pool=self.pool)
                self._count()

    def _tell_view(self, known: _Known) -> None:
        if self.view is not None:
            member = known.member
            self.view.add_worker(member.worker, approximate=known.approximate, capacity_blocks=member.blocks)

    def _count(self) -> None:
        metrics.APPROXIMATE.labels(self.pool).set(sum(known.approximate for known in self._known.values()))

    def _say(self, worker: str, why: str) -> None:
        log.warning("worker.approximate", worker=worker, pool=self.pool, why=why)
