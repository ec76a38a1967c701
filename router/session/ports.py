"""What a router session needs of its scheduler and of what keeps its index current, as protocols.

`headrace.router.placement.scheduler.Scheduler` and the stream follower are the real things; protocol tests bring a
random scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from headrace.broker.messages import Explanation, JobEvent, LoadReport
from headrace.router.placement.types import Decision, Placement, Shed, Waiting, WorkerInfo


class Scheduling(Protocol):
    """Decides, without I/O. All times are of the caller's one clock."""

    several_tenants: bool  # more than one has requests in the stream before the window

    def put_worker(self, info: WorkerInfo, now_s: float) -> None: ...
    def remove_worker(self, worker: str, now_s: float) -> None: ...
    def set_routers(self, names: Iterable[str]) -> None:
        """The live routers of this pool; it may have been left out itself."""

    def on_report(self, report: LoadReport, now_s: float) -> None: ...
    def on_event(self, event: JobEvent, now_s: float) -> None: ...
    def offer(self, request: Waiting, now_s: float) -> Shed | None:
        """Into the window, or shed at once."""

    def cancel(self, ids: Iterable[str]) -> list[Waiting]:
        """Drop these; returns those that were waiting."""

    def decide(self, now_s: float) -> list[Decision]: ...
    def next_wake_s(self, now_s: float) -> float | None:
        """When `decide` should be called although nothing has happened."""

    def unplace(self, placement: Placement, now_s: float) -> None:
        """The placement did not happen: back into the window."""

    @property
    def waiting(self) -> int: ...
    def explain(self, request_id: str, now_s: float) -> Explanation | None:
        """`at` of the answer is of that same clock."""


class CacheFeed(Protocol):
    """What is known of the workers' caches (`headrace.router.kv_events.reader.KvEventReader`)."""

    def distrust(self, worker: str) -> None:
        """Its blocks are guessed from now on: the next event is a new beginning."""

    def known(self, worker: str) -> tuple[int, int] | None:
        """(epoch, n) of its last event that was read; None when there was none."""


class Feed(Protocol):
    """Keeps the index current from the KV stream (`headrace.router.replica.follower.KvFollower`)."""

    async def run(self) -> None:
        """Until cancelled."""

    async def release(self) -> None:
        """Before leaving: another router may make the snapshots."""

    @property
    def ready(self) -> bool:
        """The index has caught up with the stream once."""

    @property
    def lag(self) -> int:
        """Messages stored in the stream and not applied yet."""
