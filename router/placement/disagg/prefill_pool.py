"""The prefill workers of a pool as one router knows them, and the time at which each will have finished its jobs.

Jobs for any of them wait in one queue and are pulled by the worker that has room, so a job is counted at the worker that will
be free first.  That time (`free_s`) is a prediction: it moves on with every job placed, by whatever router, falls back when a
prompt turns out to be done earlier, and is corrected by the workers' load reports.  It passes by itself: a job that is never
reported delays others no longer than its own work takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.broker.messages import LoadReport
from headrace.router.placement.calibration import SpeedEstimate
from headrace.router.placement.types import WorkerInfo
from headrace.router.placement.worker_columns import WorkerColumns

IN_TRANSIT_S = 0.25  # a job placed longer ago than this has reached its prefill worker, if that had nothing else to do
ANY = "*"  # in a job event: any prefill worker


@dataclass(slots=True)
class PrefillLoad:
    """Load of a prefill worker. Times are seconds of the scheduler's clock."""

    info: WorkerInfo
    column: int
    speed: SpeedEstimate
    free_s: float = 0.0  # predicted end of all its jobs
    jobs: dict[str, PrefillEntry] = field(default_factory=dict)  # counted here, in the order of placement

    @property
    def ready(self) -> bool:
        return not self.info.draining

    def service_s(self, tokens: float) -> float:
        """Predict the time to compute that many tokens, steps included."""
        steps = 1.0 if not self.info.step_tokens else max(1.0, tokens / self.info.step_tokens)
        return tokens / self.speed.prefill_tokens_per_s + steps * self.speed.base_s

    def wait_s(self, now_s: float) -> float:
        """Predict the wait until the worker could begin with one more prompt."""
        return max(0.0, self.free_s - now_s)

    def shift(self, by_s: float, after_s: float) -> None:
        """Move the predicted end by `by_s`, and that of its jobs that end after `after_s`."""
        self.free_s += by_s
        for job in self.jobs.values():
            if job.done_s > after_s:
                job.done_s += by_s


@dataclass(slots=True)
class PrefillEntry:
    """A prompt that a prefill worker computes, or will compute."""

    worker: str  # where it is counted
    decode: str
    tokens: float
    blocks: int  # KV blocks it will need on the decode worker, which does not count them yet
    named: bool
    placed_s: float
    service_s: float
    done_s: float  # predicted


class PrefillPool(WorkerColumns[PrefillLoad]):
    """Holds the prefill workers, in columns of their own, and their jobs.

    A job that is reported later than predicted by more than `grace_s` is forgotten.
    """

    def __init__(self, grace_s: float) -> None:
        super().__init__(PrefillLoad)
        self._grace_s = grace_s
        self.jobs: dict[str, PrefillEntry] = {}
        self._awaited: dict[str, int] = {}  # KV blocks by decode worker

    # Workers.

    def remove(self, worker: str, now_s: float) -> PrefillLoad | None:
        """Remove a worker, and count its jobs at those that are left: they get them, or the decode workers compute them."""
        load = self._remove(worker)
        if load is None:
            return None
        for job_id, job in list(load.jobs.items()):
            self.close(job_id, now_s)
            if job.done_s > now_s:
                self.place(
                    job_id,
                    decode=job.decode,
                    handover=load.info.handover,
                    tokens=job.tokens,
                    blocks=job.blocks,
                    now_s=now_s,
                )
        return load

    def on_report(self, report: LoadReport, speed: SpeedEstimate, now_s: float) -> None:
        """Correct the prediction by a load report."""
        load = self._by_name[report.worker]
        load.speed = speed
        wait_s = load.wait_s(now_s)
        if report.running or report.waiting or report.queued_prefill_tokens:
            least_s = report.queued_prefill_tokens / speed.prefill_tokens_per_s
            if least_s > wait_s:
                load.free_s = max(load.free_s, now_s)
                load.shift(least_s - wait_s, now_s)
            return
        # The worker has nothing to do, so only those of its jobs that were placed just now can still be on their way.
        coming_s = sum(job.service_s for job in load.jobs.values() if job.placed_s > now_s - IN_TRANSIT_S)
        if coming_s < wait_s:
            load.shift(coming_s - wait_s, now_s)

    # Jobs.

    def place(
        self, job_id: str, *, decode: str, handover: str, tokens: float, blocks: int, now_s: float, worker: str = ""
    ) -> None:
        """Count a job. `tokens`: those that a prefill worker has to compute. `worker`: the one named for it, empty = any."""
        self.close(job_id, now_s)
        load = self._by_name.get(worker) if worker else None
        if load is None:
            able = [one for one in self.ordered if one.info.handover == handover]
            load = min(able, key=lambda one: (not one.ready, one.wait_s(now_s)), default=None)
        service_s = 0.0
        done_s = now_s
        if load is not None:
            service_s = load.service_s(tokens)
            load.free_s = done_s = max(load.free_s, now_s) + service_s
        job = PrefillEntry(
            load.info.worker if load is not None else "", decode, tokens, blocks, bool(worker), now_s, service_s, done_s
        )
        self.jobs[job_id] = job
        if load is not None:
            load.jobs[job_id] = job
        self._awaited[decode] = self._awaited.get(decode, 0) + blocks

    def close(self, job_id: str, now_s: float) -> PrefillEntry | None:
        """Drop a job whose prompt is computed or no longer wanted, and return it. An unknown one is ignored."""
        job = self.jobs.pop(job_id, None)
        if job is None:
            return None
        left = self._awaited.get(job.decode, 0) - job.blocks
        if left > 0:
            self._awaited[job.decode] = left
        else:
            self._awaited.pop(job.decode, None)
        load = self._by_name.get(job.worker)
        if load is not None:
            load.jobs.pop(job_id, None)
            early_s = min(job.done_s - now_s, job.service_s)
            if early_s > 0:
                load.shift(-early_s, job.done_s)
        return job

    def expire(self, now_s: float) -> None:
        """Forget jobs that should have been reported long ago."""
        late = [i for i, job in self.jobs.items() if now_s > job.done_s + self._grace_s + job.service_s]
        for job_id in late:
            self.close(job_id, now_s)

    # Figures.

    def awaited_blocks(self, decode: str) -> int:
        """Count the KV blocks that this decode worker will need for prompts that prefill workers compute now."""
        return self._awaited.get(decode, 0)

    def queued_tokens(self, now_s: float) -> float:
        """Predict the tokens of jobs that are placed and not computed yet."""
        queued = 0.0
        for job in self.jobs.values():
            if job.done_s > now_s and job.service_s > 0:
                queued += job.tokens * min(1.0, (job.done_s - now_s) / job.service_s)
        return queued
