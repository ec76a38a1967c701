"""Ports of a router session: the scheduler that it asks, and the index that is kept current for it, as protocols.

`headrace.router.placement.scheduler.Scheduler` and `headrace.router.replica.follower.KvFollower` are the real things; protocol
tests bring a random scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Protocol

from headrace.broker.messages import Explanation, JobEvent, LoadReport
from headrace.router.index.types import CacheView
from headrace.router.placement.types import Decision, Placement, Shed, Waiting, WorkerInfo


class SchedulingPort(Protocol):
    """Decides without I/O. All times are of the caller's one clock."""

    several_tenants: bool  # more than one has requests in the stream before the window

    def put_worker(self, info: WorkerInfo, now_s: float) -> None: ...
    def remove_worker(self, worker: str, now_s: float) -> None: ...
    def set_routers(self, names: Iterable[str]) -> None:
        """Name the live routers of this pool; this one may be left out."""

    def on_report(self, report: LoadReport, now_s: float) -> None: ...
    def on_event(self, event: JobEvent, now_s: float) -> None: ...
    def place_now(self, request: Waiting, now_s: float) -> Placement | None:
        """Place a request that has just come, if nothing waits and nothing speaks against it; None: offer it."""

    def offer(self, request: Waiting, now_s: float) -> Shed | None:
        """Take a request into the window, or shed it at once."""

    def assess(self, request_id: str, *, limit: int, crashes: int) -> None:
        """Note what the judge of a waiting request says: its group limit, 0 = it is no suspect."""

    def cancel(self, ids: Iterable[str]) -> list[Waiting]:
        """Drop these requests. Return those that were waiting."""

    def decide(self, now_s: float) -> list[Decision]: ...
    def next_wake_s(self, now_s: float) -> float | None:
        """Return when `decide` should be called although nothing has happened; None if that is not needed."""

    def unplace(self, placement: Placement, now_s: float) -> None:
        """Take a request back into the window whose placement did not happen."""

    @property
    def waiting(self) -> int: ...
    @property
    def suspects_awaiting_lost(self) -> int:
        """The suspects that wait for workers to come back, since the only one left serves ordinary requests."""

    def explain(self, request_id: str, now_s: float) -> Explanation | None:
        """Explain the decision about a request, with `at` on the caller's clock; None if it is not known."""

    def queued_prefill_tokens(self, now_s: float) -> float:
        """Estimate the prompt tokens that are placed for prefill workers and not computed yet."""


class CacheFeed(Protocol):
    """The senders of cache events (`headrace.router.kv_events.sources.KvEventSources`)."""

    def distrust(self, worker: str) -> None:
        """Take the next event of this worker for a new beginning, because its blocks are guessed from now on."""

    def known(self, worker: str) -> tuple[int, int] | None:
        """Return (epoch, n) of the last event read from this worker; None if there was none."""


class Feed(Protocol):
    """Keeps the index current from the KV stream (`headrace.router.replica.follower.KvFollower`)."""

    async def run(self) -> None:
        """Read events until cancelled."""

    async def release(self) -> None:
        """Let another router make the snapshots. Call it before leaving."""

    @property
    def ready(self) -> bool:
        """The index has caught up with the stream once."""

    @property
    def lag(self) -> int:
        """Messages stored in the stream and not applied yet."""


@dataclass(frozen=True, slots=True)
class PoolIndex:
    """The index of one pool: `follower` writes into `view` the events that `events` keeps track of.

    The length of `entries` is the number of blocks in the index, counted once per worker and tier.
    """

    view: CacheView
    events: CacheFeed
    follower: Feed
    entries: Sized
