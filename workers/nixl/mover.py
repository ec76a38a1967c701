"""The mover posts the parts of transfers, notices their ends and gives up late ones. It knows NIXL only as `Driver`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import structlog

from headrace.base.metrics import Counter, Gauge, Histogram
from headrace.workers.nixl.descriptors import BlocksBusy, DescriptorRun, DriverFailed, Indices, PeerGone
from headrace.workers.nixl.driver import Driver, Status

# Prometheus metrics of transfers. `op`: read or write.

BYTES = Counter("headrace_nixl_bytes_total", "Bytes that NIXL says it moved", ["op"])
TRANSFERS = Counter("headrace_nixl_transfers_total", "Transfers that ended", ["op", "outcome"])
FAILURES = Counter("headrace_nixl_failures_total", "Transfers that failed, by reason", ["op", "reason"])
SECONDS = Histogram(
    "headrace_nixl_transfer_seconds",
    "Time from asking for a transfer to seeing its end",
    ["op"],
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
DESCRIPTORS = Histogram(
    "headrace_nixl_transfer_descriptors",
    "Ranges of memory in a transfer after adjacent blocks were merged",
    ["op"],
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384),
)
PEERS = Gauge("headrace_nixl_peers", "Agents whose memory can be reached")
PEERS_LOST = Counter("headrace_nixl_peers_lost_total", "Peers dropped because NIXL found them disconnected")
UNSETTLED = Gauge("headrace_nixl_unsettled_transfers", "Transfers given up that may still touch memory")


Operation = Literal["read", "write"]
State = Literal["active", "done", "failed"]
Reason = Literal["", "deadline", "peer_gone", "forgotten", "refused", "closed"]


class Transfer:
    """A read or write of blocks. It changes only inside calls of the `Agent` that made it.

    Attributes:
        op: read or write another engine's memory.
        peer: the other agent's name.
        local: our blocks, in the order NIXL was told.
        bytes: how many were asked for.
        descriptors: ranges NIXL moved so far, after merging, by its own count.
        state: "active", "done" or "failed".
        reason: why it failed, one word: "deadline", "peer_gone", "forgotten", "refused" (by NIXL) or "closed".
        error: the same as a sentence; "" unless failed.
        took_s: from the request to its end; 0 while active.
        settled: nothing touches the blocks any more. A failed transfer can be unsettled for as long as its peer stands still:
            neither NIXL nor the network can be made to forget a request, so its blocks must not be used until then.
            The other side of a failed write is not told: blocks offered for writing are safe again only when the writer said so
            or is dead.
    """

    __slots__ = ("bytes", "descriptors", "error", "local", "op", "peer", "reason", "settled", "state", "took_s")

    def __init__(self, op: Operation, peer: str, local: Indices, size: int) -> None:
        self.op: Operation = op
        self.peer = peer
        self.local = local
        self.bytes = size
        self.descriptors = 0
        self.state: State = "active"
        self.reason: Reason = ""
        self.error = ""
        self.took_s = 0.0
        self.settled = False

    def __repr__(self) -> str:
        end = f", reason={self.reason!r}, settled={self.settled}" if self.state == "failed" else ""
        return f"Transfer({self.op!r}, {self.peer!r}, blocks={len(self.local)}, bytes={self.bytes}, state={self.state!r}{end})"


log = structlog.get_logger()

TURN_S = 0.004
"""A call stops posting after this long, so one call lasts at most about this and one part."""
MOST_POSTED = 16
"""Parts of one transfer under way at once: enough to keep a network busy, and a bound on what a stalled peer can hold."""


@dataclass(slots=True, eq=False)
class TransferJob:
    """A transfer and what is left of it. `make` turns a part into a handle; `finish` runs when every part arrived."""

    transfer: Transfer
    parts: deque[DescriptorRun]
    make: Callable[[DescriptorRun], int]
    began_s: float
    deadline_s: float
    finish: Callable[[], None] | None = None
    posted: list[int] = field(default_factory=list)


class TransferQueue:
    """The transfers of one driver. `lost` is called once per failure that NIXL blames on a peer's absence."""

    def __init__(self, posts: Driver, *, clock: Callable[[], float], lost: Callable[[str], None]) -> None:
        self._posts = posts
        self._clock = clock
        self._lost = lost
        self._jobs: deque[TransferJob] = deque()
        self._given_up: list[TransferJob] = []
        self._ended: list[Transfer] = []

    @property
    def active(self) -> int:
        """Transfers that `take_ended` has not returned yet."""
        return len(self._jobs) + len(self._ended)

    @property
    def unsettled(self) -> int:
        """Transfers that failed and may still touch memory."""
        return len(self._given_up)

    def unsettled_with(self, peer: str) -> bool:
        return any(job.transfer.peer == peer for job in self._given_up)

    def check_free(self, local: Indices) -> None:
        """Check own blocks. Raises BlocksBusy when a transfer that was given up may still touch one of them."""
        for job in self._given_up:
            if (both := np.intersect1d(local, job.transfer.local)).size:
                raise BlocksBusy(f"block {both[0]} is not free: {job.transfer} may still touch it")

    def start(self, job: TransferJob) -> None:
        self._jobs.append(job)
        self._post(job, self._clock() + TURN_S)
        self._sweep()

    def advance(self) -> None:
        for job in self._jobs:
            self._check(job)
        until_s = self._clock() + TURN_S
        for job in list(self._jobs):
            self._post(job, until_s)
        self._jobs.rotate(-1)  # another transfer is first next time
        self._sweep()
        self._settle()

    def take_ended(self) -> list[Transfer]:
        """Return the transfers that ended since the last call, each once."""
        ended, self._ended = self._ended, []
        return ended

    def fail_peer(self, peer: str, reason: Reason, error: str) -> None:
        for job in self._jobs:
            if job.transfer.peer == peer and job.transfer.state == "active":
                self._fail(job, reason, error)
        self._sweep()
        self._settle()

    def fail_all(self, reason: Reason, error: str) -> None:
        for peer in {job.transfer.peer for job in self._jobs}:
            self.fail_peer(peer, reason, error)

    # -- one transfer ----------------------------------------------------------------------------------------

    def _check(self, job: TransferJob) -> None:
        if job.transfer.state != "active":
            return
        moving: list[int] = []
        trouble: DriverFailed | None = None
        for handle in job.posted:
            try:
                if self._posts.status(handle) is Status.MOVING:
                    moving.append(handle)
                else:
                    self._arrived(job, handle)
            except DriverFailed as error:
                trouble = error
                self._release(handle)
        job.posted = moving
        if trouble is not None:
            self._blame(job, trouble)
        elif not job.posted and not job.parts:
            self._finish(job)
        elif self._clock() >= job.deadline_s:
            self._late(job)

    def _post(self, job: TransferJob, until_s: float) -> None:
        """Hand parts over until the turn is over. A transfer past its deadline posts nothing more."""
        while job.transfer.state == "active" and job.parts and len(job.posted) < MOST_POSTED:
            now = self._clock()
            if now >= job.deadline_s:
                self._late(job)
                return
            if now >= until_s:
                return
            handle: int | None = None
            try:
                handle = job.make(job.parts[0])
                status = self._posts.post(handle)
            except DriverFailed as error:
                if handle is not None:
                    self._release(handle)
                self._blame(job, error)
                return
            job.parts.popleft()
            if status is Status.DONE:
                self._arrived(job, handle)
            else:
                job.posted.append(handle)
        if job.transfer.state == "active" and not job.parts and not job.posted:
            self._finish(job)

    def _arrived(self, job: TransferJob, handle: int) -> None:
        size, descriptors = self._posts.moved(handle)
        job.transfer.descriptors += descriptors
        BYTES.labels(job.transfer.op).inc(size)
        self._release(handle)

    def _finish(self, job: TransferJob) -> None:
        transfer = job.transfer
        if job.finish is not None:
            try:
                job.finish()
            except DriverFailed as error:
                self._blame(job, error)
                return
        transfer.state = "done"
        transfer.settled = True
        transfer.took_s = self._clock() - job.began_s
        TRANSFERS.labels(transfer.op, "done").inc()
        SECONDS.labels(transfer.op).observe(transfer.took_s)
        DESCRIPTORS.labels(transfer.op).observe(transfer.descriptors)

    def _late(self, job: TransferJob) -> None:
        allowed_s = job.deadline_s - job.began_s
        self._fail(job, "deadline", f"{job.transfer.op} with {job.transfer.peer} did not end within {allowed_s:g} s")

    def _blame(self, job: TransferJob, error: DriverFailed) -> None:
        gone = isinstance(error, PeerGone)
        self._fail(job, "peer_gone" if gone else "refused", str(error))
        if gone:
            self._lost(job.transfer.peer)

    def _fail(self, job: TransferJob, reason: Reason, error: str) -> None:
        transfer = job.transfer
        transfer.state, transfer.reason, transfer.error = "failed", reason, error
        transfer.took_s = self._clock() - job.began_s
        job.parts.clear()
        TRANSFERS.labels(transfer.op, "failed").inc()
        FAILURES.labels(transfer.op, reason).inc()
        log.warning(
            "transfer.failed", op=transfer.op, peer=transfer.peer, reason=reason, error=error, still_moving=len(job.posted)
        )

    def _release(self, handle: int) -> None:
        try:
            self._posts.release(handle)
        except DriverFailed as error:
            log.warning("transfer.not_released", error=str(error))

    # -- ends ------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        if all(job.transfer.state == "active" for job in self._jobs):
            return
        for job in self._jobs:
            if job.transfer.state == "active":
                continue
            self._ended.append(job.transfer)
            if job.posted:
                self._given_up.append(job)
                UNSETTLED.inc()
            else:
                job.transfer.settled = True
        self._jobs = deque(job for job in self._jobs if job.transfer.state == "active")

    def _settle(self) -> None:
        """Free the handles of given-up transfers that have ended, and settle those transfers."""
        for job in self._given_up:
            for handle in list(job.posted):
                try:
                    if self._posts.status(handle) is Status.MOVING:
                        continue
                except DriverFailed:
                    pass  # an error ends the transfer too
                self._release(handle)
                job.posted.remove(handle)
        for job in [job for job in self._given_up if not job.posted]:
            self._given_up.remove(job)
            job.transfer.settled = True
            UNSETTLED.dec()
            log.info("transfer.settled", op=job.transfer.op, peer=job.transfer.peer)
