"""The parts of a worker session over a world that notes what is done with it: engine, lease, members, mover and connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import msgspec

from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.members import WorkerMember
from headrace.broker.protocol.run import Run
from headrace.broker.settings import SessionSettings, Timing
from headrace.broker.worker.presence import Presence
from headrace.broker.worker.reports import Reports
from headrace.broker.worker.runs import WorkerRuns
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope

SLOTS = 4


class World:
    """Everything outside the session. `others`: workers that serve the pool; `fixed`: runs that no other one could continue."""

    def __init__(self) -> None:
        self.held = True
        self.sent: list[tuple[str, bytes]] = []
        self.announced: list[WorkerMember] = []
        self.others: Sequence[str] = ("w2",)
        self.live_judges: set[str] | None = None  # None: all
        self.started: list[Run] = []
        self.stopped: list[Run] = []
        self.moved: list[tuple[int, str | None, str, int]] = []
        self.stored_again: list[int] = []
        self.kept: list[set[int]] = []
        self.events: list[str] = []
        self.loads = 0  # changes of the load
        self.blocks_total = self.blocks_used = 0
        self.fixed: set[Run] = set()

    # The connection.

    def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        self.sent.append((subject, data))

    def bucket(self, name: str) -> MagicMock:
        return MagicMock(put=self.put)

    async def put(self, key: str, value: bytes) -> None: ...

    # The lease and the members.

    async def update(self, value: bytes) -> None:
        self.announced.append(msgspec.msgpack.decode(value, type=WorkerMember))

    def serving_workers(self, pool: str) -> list[WorkerMember]:
        return [WorkerMember(worker=name, pool=pool, model="m", slots=8) for name in ("w", *self.others)]

    def having(self, pool: str, adapter: str) -> list[WorkerMember]:
        return self.serving_workers(pool)

    def ingress_live(self, name: str) -> bool:
        return self.live_judges is None or name in self.live_judges

    async def ingress_gone(self, name: str) -> bool:
        return False

    # The engine.

    def start(self, run: Run, payload: bytes) -> None:
        self.started.append(run)

    def stop(self, run: Run) -> None:
        self.stopped.append(run)

    def resumable(self, run: Run) -> bool:
        return run not in self.fixed

    def load(self, report: LoadReport) -> LoadReport:
        return msgspec.structs.replace(report, blocks_total=self.blocks_total, blocks_used=self.blocks_used)

    # The mover.

    async def move(self, *, seq: int, suspect: str | None, reason: str, group: int = 0, **_of: Any) -> None:
        self.moved.append((seq, suspect, reason, group))

    async def move_all(self, worker: str, *, died: bool, reason: str, keep: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.kept.append(keep)

    async def store_again(self, seq: int, _data: bytes, _headers: Any) -> None:
        self.stored_again.append(seq)

    # The reports.

    def add(self, kind: str, *_others: Any, **_named: Any) -> None:
        self.events.append(kind)

    def load_changed(self) -> None:
        self.loads += 1


class Bench:
    """A worker `w` with four slots, its presence and its runs. The lease is held."""

    def __init__(self, *runs: Run, timing: Timing | None = None, wall_s: float = 5.0, **member: Any) -> None:
        self.world: Any = World()
        settings = SessionSettings(slots=SLOTS, max_attempts=3, timing=timing or Timing())
        self.deps = WorkerDeps(messaging=self.world, subjects=Subjects(), settings=settings, wall=lambda: wall_s)
        self.presence: Any = Presence(self.deps, WorkerMember(worker="w", pool="p", model="m", slots=SLOTS, **member))
        self.presence.lease = self.presence.members = self.presence.mover = self.world
        self.changes: list[int] = []
        self.tasks = TaskScope()
        reports: Reports = self.world
        self.runs = WorkerRuns(self.deps, self.presence, reports, self.world, self.tasks)
        self.presence.on_change(lambda: self.changes.append(self.runs.free_slots))
        for run in runs:
            self.runs.table.add(run)
