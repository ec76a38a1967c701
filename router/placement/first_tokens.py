"""Predicts when the prompt of a placed request will be computed, and learns from each one how far that was off. Sans-io.

    seconds = (rest of the running step + steps of the prompts before it and of its own) × what such requests have taken of that

An engine begins with a prompt when its step has ended.  Of a step with prompts the tokens left are reported; of one that only
decodes half is assumed to be left.  What is in no such model (messages on their way, noise, an engine that batches otherwise,
prompts that come to be computed beside it) is a factor, learnt as the running median of measured over predicted seconds: by
fleet, by powers of four of the uncached tokens, and by what the engine was at.  The median is followed in steps of bounded
size, so that one request that took a hundred times as long moves it no further than one that took twice as long.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, exp, inf, log
from typing import NamedTuple

from headrace.broker.messages import JobEvent
from headrace.router.index.types import Overlap
from headrace.router.placement.costs.cost import STEP_TOKENS
from headrace.router.placement.disagg_planner import DisaggPlan
from headrace.router.placement.fleets.promises import Promises
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.placements import uncached_tokens
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Waiting

MOST_OPEN = 20_000  # placements remembered until their prompts are computed
GAIN = 0.03  # the longest step of a median, in the logarithm
FIRST_GAIN = 0.7  # of the first step; the nth has this over n, until that is below GAIN
MOST_FACTOR = 4.0  # learnt, either way
SIZES = 4.0  # each class of prompt lengths is that many times as long as the one before
_MOST_LOG = log(MOST_FACTOR)


class Bucket(NamedTuple):
    """Requests whose predictions are off alike. `state`: cold, idle, decoding, filling or remote."""

    fleet: str
    size: int
    state: str


def bucket_of(fleet: str, tokens: float, state: str) -> Bucket:
    """Return the bucket of a prompt by its uncached tokens."""
    return Bucket(fleet, int(log(max(tokens, 1.0), SIZES)), state)


class Medians:
    """The running median of measured over predicted seconds in each bucket, as a factor."""

    def __init__(self) -> None:
        self._logs: dict[Bucket, float] = {}
        self._counts: dict[Bucket, int] = {}

    def factor(self, bucket: Bucket) -> float:
        """Return what a prediction in this bucket is multiplied with; 1 while nothing is known."""
        return exp(self._logs.get(bucket, 0.0))

    def observe(self, bucket: Bucket, *, predicted_s: float, measured_s: float) -> None:
        """Learn from a request. Times that are not above zero and finite are ignored."""
        if not (0.0 < predicted_s < inf and 0.0 < measured_s < inf):
            return
        count = self._counts[bucket] = self._counts.get(bucket, 0) + 1
        gain = max(FIRST_GAIN / count, GAIN)
        now = self._logs.get(bucket, 0.0)
        now += min(max(log(measured_s) - log(predicted_s) - now, -gain), gain)
        self._logs[bucket] = min(max(now, -_MOST_LOG), _MOST_LOG)


class EngineNow(NamedTuple):
    """Work of an engine at the moment when a prompt is placed on it."""

    running_s: float  # left of the step that runs
    before: float  # prompt tokens that no step has begun with
    step_s: float  # seconds of a step beside its prompts
    token_s: float
    step_tokens: float
    slot_wait_s: float  # until a slot is free

    @property
    def state(self) -> str:
        """Name what makes a prompt wait."""
        return "filling" if self.before else "decoding" if self.running_s else "idle"


def engine_now(load: WorkerLoad, now_s: float) -> EngineNow:
    """Describe the engine of a worker by its last report and by what was placed on it since."""
    speed, report = load.speed, load.report
    step_s = speed.step_s(prefill_tokens=0, decodes=load.running)
    running_s, before = 0.0, float(load.placed_tokens)
    if report is not None and report.step_prefill_tokens and report.step_s:
        begun = min(report.queued_prefill_tokens, report.step_prefill_tokens)
        running_s = report.step_s * begun / report.step_prefill_tokens - (now_s - load.reported_s)
        done = max(-running_s, 0.0) * speed.prefill_tokens_per_s
        before += max(report.queued_prefill_tokens - begun - done, 0.0)
        if running_s < 0.0 and report.running:
            running_s = 0.5 * step_s  # that step has ended, and the next ones have decoded
    elif report is not None:
        before += max(report.queued_prefill_tokens - (now_s - load.reported_s) * speed.prefill_tokens_per_s, 0.0)
        running_s = 0.5 * report.step_s if report.running else 0.0
    slot_wait_s = load.slot_wait_s()
    return EngineNow(
        running_s=max(running_s, 0.0),
        before=before,
        step_s=step_s,
        token_s=1.0 / speed.prefill_tokens_per_s,
        step_tokens=float(load.info.step_tokens or STEP_TOKENS),
        slot_wait_s=slot_wait_s if slot_wait_s < inf else 0.0,
    )


def until_computed_s(engine: EngineNow, tokens: float) -> float:
    """Predict when a prompt of so many uncached tokens is computed, if nothing is placed beside it."""
    own = engine.before + tokens
    return engine.running_s + engine.slot_wait_s + own * engine.token_s + ceil(own / engine.step_tokens) * engine.step_s


class _Open(NamedTuple):
    """A prediction whose outcome is not known."""

    bucket: Bucket
    placed_s: float
    seconds: float  # without the factor


class FirstTokens:
    """Predicts for one router whose pool has several fleets. Times are seconds of the scheduler's clock."""

    def __init__(self, loads: LoadTable, settings: SchedulerSettings) -> None:
        self._loads = loads
        self._assumed = settings.calibration.prefill_tokens_per_s
        self._medians = Medians()
        self._open: dict[tuple[str, int], _Open] = {}
        self.promises = Promises(loads, settings.promise)

    def __len__(self) -> int:
        return len(self._open)

    def foresee(self, request: Waiting, load: WorkerLoad, plan: DisaggPlan, overlap: Overlap, now_s: float) -> DisaggPlan:
        """Return the plan of a request that is placed now with the time to its first token as `predict` has it."""
        return replace(plan, wait_s=0.0, service_s=self.predict(request, load, plan, overlap, now_s))

    def predict(self, request: Waiting, load: WorkerLoad, plan: DisaggPlan, overlap: Overlap, now_s: float) -> float:
        """Predict the seconds from now until the prompt of a request that is placed now is computed, and remember that."""
        tokens = uncached_tokens(request, overlap)
        if plan.remote:
            seconds = plan.wait_s + plan.service_s
            bucket = bucket_of(load.info.fleet, tokens, "remote")
        else:
            engine = engine_now(load, now_s)
            seconds = until_computed_s(engine, tokens)
            if load.speed.prefill_tokens_per_s == self._assumed:  # by the settings: no step of its fleet has been learnt from
                bucket = bucket_of(load.info.fleet, 1, "cold")
            else:
                bucket = bucket_of(load.info.fleet, tokens, engine.state)
        self._open[request.id, request.attempt] = _Open(bucket, now_s, seconds)
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        seconds *= self._medians.factor(bucket)
        if not plan.remote:
            self._promise(load, engine, tokens, request.age_s(now_s) + seconds, now_s)
        return seconds

    def placed_elsewhere(self, event: JobEvent, now_s: float) -> None:
        """Promise the same for a placement of another router, whose request came now as far as is known."""
        load = self._loads.get(event.worker)
        if load is not None and not event.prefill:
            engine, tokens = engine_now(load, now_s), float(event.uncached or event.tokens)
            self._promise(load, engine, tokens, until_computed_s(engine, tokens), now_s)

    def on_event(self, event: JobEvent, now_s: float) -> None:
        """Learn when a prompt is computed; forget the predictions of requests that have ended."""
        if not self._open or event.kind not in ("prefilled", "settled", "moved"):
            return
        found = self._open.pop((event.id, event.attempt), None)
        if found is not None and event.kind == "prefilled":
            self._medians.observe(found.bucket, predicted_s=found.seconds, measured_s=now_s - found.placed_s)

    def _promise(self, load: WorkerLoad, engine: EngineNow, tokens: float, ttft_s: float, now_s: float) -> None:
        if len(self._loads.fleets) > 1:
            takes_s = min(tokens, engine.step_tokens) * engine.token_s
            self.promises.note(load.info.worker, begins_s=now_s + engine.running_s, takes_s=takes_s, ttft_s=ttft_s, now_s=now_s)
