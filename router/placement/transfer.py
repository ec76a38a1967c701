"""Prefill on another worker: KV transfer times, the prefill workers of a pool, and the cost of computing a prompt there.

Hand-over times, from a computed prompt to the first token on its decode worker, learnt from load reports.

    handover_s ≈ fixed_s + tokens fetched × per_token_s

They begin when the blocks are ready, and include messages, the transfer, and the decode worker's own first step.  Least
squares of relative errors with exponential forgetting, as in `calibration.py`, on two unknowns; samples far off (the decode
worker was busy with something else) count less, and a prior fades with the first dozens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np
import numpy.typing as npt

from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.requests import PrefillDecision
from headrace.router.placement.calibration import SpeedEstimate
from headrace.router.placement.load import LoadTable, WorkerColumns
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import WorkerInfo

FORGETTING = 0.95  # per sample: about the last 20 count
PRIOR_SAMPLES = 3.0
PRIOR_FORGETTING = 0.9
HOLD = 0.02  # pull towards the present estimate, in samples
LEAST_FACTOR = 1e-3  # of the prior
MOST_S = 120.0  # a longer hand-over is not believed
MOST_TOKENS = 100_000_000
HUBER = 2.0
ERROR_GAIN = 0.1
LEAST_ERROR = 0.02


class TransferTimes:
    """The model of one pool. It has one for all workers, because the pairs that hand over change from prompt to prompt."""

    def __init__(self, *, fixed_s: float, per_token_s: float) -> None:
        """Assume these at first; both are above 0."""
        self._prior = (fixed_s, per_token_s)
        self._factors = (1.0, 1.0)  # estimate = prior × factors
        self._prior_weight = PRIOR_SAMPLES
        self._a = [0.0, 0.0, 0.0]  # 00 01 11
        self._b = [0.0, 0.0]
        self._error = 0.5
        self._last: dict[str, tuple[float, int]] = {}
        self.samples = 0

    @property
    def fixed_s(self) -> float:
        return self._prior[0] * self._factors[0]

    @property
    def per_token_s(self) -> float:
        return self._prior[1] * self._factors[1]

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + tokens * self.per_token_s

    def observe(self, report: LoadReport) -> bool:
        """Learn from the report of a decode worker. Return False if it has nothing new, or nothing that can be believed."""
        sample = (report.handover_s, report.handover_tokens)
        if sample == self._last.get(report.worker, (0.0, 0)):
            return False
        self._last[report.worker] = sample
        took_s, tokens = sample
        if not (isfinite(took_s) and 0 < took_s <= MOST_S and 0 <= tokens <= MOST_TOKENS):
            return False
        self._learn(took_s, tokens)
        self.samples += 1
        return True

    def remove(self, worker: str) -> None:
        """Drop a worker that has left, and keep what was learnt from it. An unknown one is ignored."""
        self._last.pop(worker, None)

    def _learn(self, took_s: float, tokens: int) -> None:
        predicted = self.seconds(tokens)
        error = took_s / predicted - 1.0
        size, bound = abs(error), HUBER * self._error
        weight = bound / size if size > bound else 1.0
        self._error = max(self._error + ERROR_GAIN * (min(size, 3.0 * bound) - self._error), LEAST_ERROR)
        self._prior_weight *= PRIOR_FORGETTING
        scale = max(predicted, took_s if weight >= 1.0 else 0.0)
        z0, z1, target = self._prior[0] / scale, self._prior[1] * tokens / scale, took_s / scale
        a, b = self._a, self._b
        a[0] = FORGETTING * a[0] + weight * z0 * z0
        a[1] = FORGETTING * a[1] + weight * z0 * z1
        a[2] = FORGETTING * a[2] + weight * z1 * z1
        b[0] = FORGETTING * b[0] + weight * z0 * target
        b[1] = FORGETTING * b[1] + weight * z1 * target
        self._solve()

    def _solve(self) -> None:
        """Find the factors that fit best, none below LEAST_FACTOR: one that is gets it, and the other is solved alone."""
        old0, old1 = self._factors
        hold0, hold1 = HOLD / max(old0, 1.0) ** 2, HOLD / max(old1, 1.0) ** 2
        pull = self._prior_weight
        a00, a01, a11 = self._a[0] + hold0 + pull, self._a[1], self._a[2] + hold1 + pull
        b0, b1 = self._b[0] + hold0 * old0 + pull, self._b[1] + hold1 * old1 + pull
        determinant = a00 * a11 - a01 * a01
        if determinant > 1e-12 * a00 * a11:
            x0, x1 = (b0 * a11 - b1 * a01) / determinant, (b1 * a00 - b0 * a01) / determinant
        else:
            x0, x1 = old0, old1
        if x0 < LEAST_FACTOR:
            x0, x1 = LEAST_FACTOR, (b1 - a01 * LEAST_FACTOR) / a11
        if x1 < LEAST_FACTOR:
            x0, x1 = max((b0 - a01 * LEAST_FACTOR) / a00, LEAST_FACTOR), LEAST_FACTOR
        self._factors = (x0, x1)


# The prefill workers of a pool as one router knows them, and the time at which each will have finished its jobs.
#
# Jobs for any of them wait in one queue and are pulled by the worker that has room, so a job is counted at the worker that
# will be free first. That time (`free_s`) is a prediction: it moves on with every job placed, by whatever router, falls back
# when a prompt turns out to be done earlier, and is corrected by the workers' load reports. It passes by itself: a job that
# is never reported delays others no longer than its own work takes.

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
        steps = 1.0 if not self.info.step_tokens else max(1.0, tokens / self.info.step_tokens)
        return tokens / self.speed.prefill_tokens_per_s + steps * self.speed.base_s

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self.free_s - now_s)

    def shift(self, by_s: float, after_s: float) -> None:
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
        late = [i for i, job in self.jobs.items() if now_s > job.done_s + self._grace_s + job.service_s]
        for job_id in late:
            self.close(job_id, now_s)

    # Figures.

    def awaited_blocks(self, decode: str) -> int:
        return self._awaited.get(decode, 0)

    def queued_tokens(self, now_s: float) -> float:
        queued = 0.0
        for job in self.jobs.values():
            if job.done_s > now_s and job.service_s > 0:
                queued += job.tokens * min(1.0, (job.done_s - now_s) / job.service_s)
        return queued


# Costs of computing a prompt on the worker that answers it, or on a prefill worker (remotely).
#
# For a request r, a decode worker d that takes hand-overs, and the prefill workers p that hand over in the same way:
#
#     local(r, d)  = wait(d) + work + step + sequences on d × (disturbance × work + late × its steps that last beyond `itl`),
#                    work being uncached(r, d) / speed(d)
#     remote(r, d) = dispatch + wait(p) + uncached(r, p) / speed(p) + step + handover(uncached(r, d))
#
# and both plus the cost of the computed tokens to those that wait (`cost.py`). Where d and p are in different zones, what is
# fetched takes longer (`prefill_zone_token_s`): that is a cost like the others, so p is chosen all the same where it saves
# more.
#
# *Disturbance*: all that d decodes waits for each step that computes prompt, and a step beyond `itl`, the longest time
# between two tokens that is thought good, is worse than that; while the other way is bearable, it is no way at all.
#
# wait(p) is what the prefill queue holds: the more there is in it, the longer a prompt has to be for the way there to pay.
# While no prefill worker has room, those in the window that are shorter count as well. A prefix cached on d need neither be
# computed nor fetched; one that is cached on a prefill worker makes its work shorter, and if that saves more than waiting for
# this very worker costs, the job goes to it by name.

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.intp]

NAME_GAIN_S = 0.005  # a particular worker is named only if that saves so much
ALIKE_S = 0.02  # workers whose waits differ by less are equally likely to pull a job first
STEP_TOKENS = 8192  # of a worker that does not say how large its steps are
MARGIN = 0.85  # predicted steps are to be that much shorter than the longest that is thought good
ANSWER_TOKENS = 200  # about the length of an answer, during which every sequence beside it waits a little longer
LEAST_WAIT_S = 2.0  # that a decode worker gives the queue: a prompt that it computes itself delays all that it decodes
PATIENCE = 2.0  # wait that a decode worker gives the queue, in parts of the predicted one


@dataclass(slots=True)
class PrefillGroup:
    """Decode workers and the ready prefill workers that hand over to them, as columns."""

    decode: Ints
    prefill: Ints
    far_s: Floats | None = (
        None  # per prefill worker: seconds more per token fetched, of those in other zones; None = all are near
    )


@dataclass(slots=True)
class PrefillView:
    """The prefill workers at one moment (a value per column of theirs), and the cost of the way there."""

    names: list[str]
    wait_s: Floats
    token_s: Floats
    step_s: Floats
    room: Bools
    groups: list[PrefillGroup]
    reachable: Bools  # per decode worker: some prefill worker is ready for it
    bare: Bools  # per decode worker: it takes hand-overs, and no prefill worker is ready for it
    takes: Bools  # per decode worker: a slot is free for a request whose prompt is computed elsewhere
    slot_wait_s: Floats  # per decode worker
    beside: Floats  # per decode worker: sequences that wait while it computes a prompt
    free_s: Floats  # per decode worker: part of a step that may compute prompts until it is longer than thought good
    busy: Bools  # per decode worker: sequences run by the last report
    peace_s: Floats  # per decode worker: the worth of a prefill worker computing it, however short it is
    disturbance: float
    late: float
    itl_s: float
    budget: Floats  # per decode worker: the most tokens of one step
    queued: Floats  # per decode worker: the prompt tokens that come before
    own_token_s: Floats  # per decode worker: seconds per token computed there
    joining_s: Floats  # per decode worker: the cost of one more sequence to the others
    price_s: float  # seconds per token, the same everywhere, by which its cost to those that wait is counted
    way_s: float  # there and back, without the tokens
    fetch_s: float  # per token fetched


def make_prefill_side(
    loads: LoadTable, pool: PrefillPool, times: TransferTimes, settings: SchedulerSettings, now_s: float
) -> PrefillView | None:
    """Describe the prefill workers as they are now; None: every prompt is computed where it is answered."""
    if settings.prefill == "never":
        return None
    zoned = settings.prefill_zone_token_s > 0 and any(one.info.zone for one in pool)
    by_handover: dict[tuple[str, str], list[int]] = {}
    for load in loads:
        if load.info.takes_handovers:
            by_handover.setdefault((load.info.handover, load.info.zone if zoned else ""), []).append(load.column)
    if not by_handover:
        return None
    groups = []
    reachable = np.zeros(len(loads), dtype=np.bool_)
    bare = np.zeros(len(loads), dtype=np.bool_)
    for (handover, zone), columns in by_handover.items():
        able = [one for one in pool if one.ready and one.info.handover == handover]
        (reachable if able else bare)[columns] = True
        if able:
            far = [bool(zone and one.info.zone) and one.info.zone != zone for one in able]
            far_s = np.array(far) * settings.prefill_zone_token_s if any(far) else None
            groups.append(
                PrefillGroup(np.array(columns, dtype=np.intp), np.array([one.column for one in able], dtype=np.intp), far_s)
            )
    if not groups and settings.prefill_unready == "local":
        return None
    token_s = np.array([1.0 / load.speed.prefill_tokens_per_s for load in loads])
    running = np.array([load.running for load in loads], dtype=np.float64)
    decoding_s = running * np.array([load.speed.per_decode_s for load in loads])
    base_s = np.array([load.speed.base_s for load in loads])
    waits = np.array([one.wait_s(now_s) for one in pool])
    early = settings.binding == "early"
    busy = np.array([load.report is not None and load.report.running > 0 for load in loads], dtype=np.bool_)
    return PrefillView(
        names=[one.info.worker for one in pool],
        wait_s=waits,
        token_s=np.array([1.0 / one.speed.prefill_tokens_per_s for one in pool]),
        step_s=np.array([one.speed.base_s for one in pool]),
        room=np.ones(len(pool), dtype=np.bool_) if early else waits < settings.prefill_lookahead_s,
        groups=groups,
        reachable=reachable,
        bare=bare,
        takes=np.array([load.takes_one_more(settings.spare_slots, settings.lookahead_s) or early for load in loads]),
        slot_wait_s=np.array([load.slot_wait_s() for load in loads]),
        beside=running + 1.0,  # another sequence may come meanwhile
        busy=busy,
        peace_s=np.where(busy, settings.prefill_patience_s, 0.0),
        disturbance=settings.prefill_disturbance,
        late=settings.prefill_late,
        itl_s=settings.prefill_itl_s,
        free_s=np.maximum(settings.prefill_itl_s * MARGIN - base_s - decoding_s, 0.0),
        budget=np.array([load.info.step_tokens or STEP_TOKENS for load in loads], dtype=np.float64),
        queued=np.array([load.queued_tokens for load in loads], dtype=np.float64),
        own_token_s=token_s,
        joining_s=settings.disturbance * decoding_s * ANSWER_TOKENS,
        price_s=float(token_s.mean()),
        way_s=settings.prefill_dispatch_s + times.fixed_s,
        fetch_s=times.per_token_s,
    )


def for_batch(side: PrefillView, loads: LoadTable, settings: SchedulerSettings, *, alone: bool) -> PrefillView:
    """Describe the same as batch requests see it: they take no slot that is kept free, or would be made free, for others.

    Unless they are `alone`, a prefill worker has room for them only while it has next to nothing before it: at most one batch
    prompt is then before an interactive one that comes, and the engine computes that one first.
    """
    takes = np.array([load.takes_batch(settings.batch_reserve) for load in loads], dtype=np.bool_)
    room = side.room if alone else side.wait_s < settings.batch_lookahead_s
    slot_wait_s = np.array([load.slot_wait_s(batch=True) for load in loads])
    return replace(side, takes=takes, room=room & side.room, slot_wait_s=slot_wait_s)


def burden_s(tokens: Floats, side: PrefillView, columns: Ints | slice = slice(None)) -> Floats:
    """Compute the cost of so many tokens (per candidate and worker) to the sequences decoded beside them."""
    budget, token_s = side.budget[columns], side.own_token_s[columns]
    together = tokens + side.queued[columns]
    over_s = np.minimum(together, budget) * token_s - side.free_s[columns]
    late_s = np.where(over_s > 0, np.maximum(together / budget, 1.0) * (side.itl_s + over_s), 0.0)
    cost: Floats = side.peace_s[columns] + side.beside[columns] * (side.disturbance * tokens * token_s + side.late * late_s)
    return cost


def disturbs(tokens: Floats, side: PrefillView) -> Bools:
    """Mark where computing so many tokens delays sequences being decoded longer than is thought good."""
    longest_s = np.minimum(tokens + side.queued, side.budget) * side.own_token_s
    found: Bools = side.busy & (longest_s > side.free_s)
    return found


@dataclass(slots=True)
class Computing:
    """Seconds to compute the prompt of each candidate by the best of some prefill workers, without the way there and back."""

    cost: Floats  # by the best worker
    here: Floats  # by the best worker with room; infinite if none has room
    service_s: Floats  # of the best worker with room, or else of the best
    wait_s: Floats
    tokens: Floats
    who: Ints  # its column if it is to be named, -1 = any


def computing(tokens: Floats, fetched: Floats, side: PrefillView, group: PrefillGroup, congestion: float) -> Computing:
    """Compute these costs. `tokens`: those to be computed, per candidate and worker of the group.

    `fetched`: tokens whose blocks are fetched, per candidate.
    """
    columns = group.prefill
    wait, room = side.wait_s[columns], side.room[columns]
    service = tokens * side.token_s[columns] + side.step_s[columns]
    alike = wait <= wait.min() + ALIKE_S
    any_tokens, any_service = tokens[:, alike].mean(axis=1), service[:, alike].mean(axis=1)
    price = congestion * side.price_s
    any_cost = wait.min() + any_service + _times(price, any_tokens)
    far = None if group.far_s is None else fetched[:, None] * group.far_s
    if far is not None:
        any_cost = any_cost + far[:, alike].mean(axis=1)
    any_here = any_cost if room.any() else np.full(len(tokens), np.inf)
    who = np.full(len(tokens), -1, dtype=np.intp)
    waits = np.full(len(tokens), wait.min())
    if len(columns) == 1:
        return Computing(any_cost, any_here, any_service, waits, any_tokens, who)
    named = wait + service + _times(price, tokens)
    if far is not None:
        named = named + far
    named_here = np.where(room, named, np.inf)
    cost = np.minimum(any_cost, named.min(axis=1) + NAME_GAIN_S)
    # Where no worker has room the best of all is described, because nothing is decided by it.
    pick = (named_here if room.any() else named).argmin(axis=1)
    every = np.arange(len(tokens))
    best = (named_here if room.any() else named)[every, pick] + NAME_GAIN_S
    better = best < (any_here if room.any() else any_cost)
    return Computing(
        cost=cost,
        here=np.minimum(any_here, named_here.min(axis=1) + NAME_GAIN_S),
        service_s=np.where(better, service[every, pick], any_service),
        wait_s=np.where(better, wait[pick], waits),
        tokens=np.where(better, tokens[every, pick], any_tokens),
        who=np.where(better, columns[pick], who),
    )


def _times(price: float, tokens: Floats) -> Floats:
    """Multiply. Tokens are infinite where a worker cannot compute a prompt, and zero times infinity is no number."""
    return price * tokens if price else np.zeros(tokens.shape)


def ahead_s(work_s: Floats, workers: int) -> Floats:
    """Return, per candidate, the seconds for which the shorter candidates keep so many prefill workers busy."""
    order = work_s.argsort(kind="stable")
    before = np.zeros(len(work_s))
    before[order[1:]] = work_s[order].cumsum()[:-1]
    return before / workers


def remote_decision(reason: str, *, worker: str, wait_s: float, settings: SchedulerSettings) -> PrefillDecision:
    patience_s = min(max(LEAST_WAIT_S, settings.prefill_dispatch_s + wait_s * PATIENCE), settings.prefill_wait_s)
    return PrefillDecision(remote=True, worker=worker, reason=reason, wait_s=round(patience_s, 3))


def local_decision(reason: str) -> PrefillDecision:
    return PrefillDecision(remote=False, reason=reason)
