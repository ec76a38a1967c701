"""Chooses the worker that acts as the janitor of a pool without a router, without any message between the workers."""

from __future__ import annotations

from headrace.broker.membership.janitor import rendezvous_first
from headrace.broker.membership.members import Members
from headrace.broker.worker.state import WorkerState
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.lease import LeaseKeeper


class JanitorElection:
    """The election as one worker sees it."""

    def __init__(self, deps: WorkerDeps, state: WorkerState, lease: LeaseKeeper, members: Members) -> None:
        self._lease_ttl_s = deps.timing.lease_ttl_s
        self._wall = deps.wall
        self._state = state
        self._lease = lease
        self._members = members

    def elected(self) -> bool:
        """Return whether this worker moves ownerless work: it is the rendezvous-first live worker, and there is no router."""
        pool, worker = self._state.pool, self._state.worker
        if not self._lease.held or self._members.has_router(pool):
            return False
        ready = self._members.ready_workers(pool)
        # A worker that has just started may not call others gone yet; if clocks differ, two act, which does no harm.
        before = self._wall() - self._lease_ttl_s
        able = [member.worker for member in ready if member.started <= before] or [member.worker for member in ready]
        return rendezvous_first(pool, able or [worker]) == worker
