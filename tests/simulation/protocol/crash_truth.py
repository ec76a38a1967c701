"""The processes that really crashed while they had a request, seen from outside of time, dead ones too."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.broker.membership.members import drained_key
from headrace.broker.protocol.run import RunState
from tests.simulation.protocol.requests import POOL, RunNote
from tests.simulation.protocol.shape import SUBJECTS, Worker
from tests.simulation.virtual.world import World

AWAY_S = 3.0  # how long a judge's answer may be under way


@dataclass(eq=False)
class CrashTruth:
    """Compares what processes believe of each other's deaths with what happened."""

    world: World
    workers: dict[str, Worker]
    runs: dict[int, RunNote]
    claimed: dict[str, set[str]]  # by which workers
    left: set[str]  # processes that went by themselves
    absent: dict[str, float] = field(default_factory=dict)  # when a living worker was last seen without a lease

    def _holders(self, request_id: str) -> list[Worker]:
        """Workers that have, or had when they died, this request beyond waiting for it to be claimed."""
        return [
            worker
            for worker in self.workers.values()
            if any(run.state is not RunState.WAITING for run in worker.session.runs.table.of(request_id))
        ]

    def _runners(self, request_id: str) -> list[Worker]:
        names = {note.machine.id for note in self.runs.values() if note.request_id == request_id}
        return [self.workers[name] for name in names | self.claimed.get(request_id, set())]

    def real_crashes(self, request_id: str) -> set[str]:
        """Workers that died undrained, or whose engine died, while they had claimed or started this request.

        Without deduplication a second copy of an attempt may lie beside one that was run and given away before: a crash then
        counts by the letter of the protocol, so having run it at any time is enough.
        """
        drained = self.world.server.buckets[SUBJECTS.bucket("state")]
        crashed = {
            w.machine.id
            for w in (self._holders(request_id) if self.world.config.dedupe else self._runners(request_id))
            if not w.machine.alive and w.machine.id not in self.left and drained.get(drained_key(w.machine.id)) is None
        }
        for worker in self.workers.values():
            crashed |= {name for ids, name in worker.engine.deaths if request_id in ids}
        return crashed

    def leaseless(self, worker: str) -> bool:
        members = self.world.server.buckets[SUBJECTS.bucket("members")]
        return members.get(SUBJECTS.worker_key(POOL, worker)) is None

    def away(self, request_id: str) -> set[str]:
        """Holders that live but could not be told from crashed ones a moment ago: their leases were gone."""
        return {
            w.machine.id
            for w in self._runners(request_id)
            if w.machine.alive
            and (self.leaseless(w.machine.id) or self.world.now - self.absent.get(w.machine.id, -AWAY_S) < AWAY_S)
        }
