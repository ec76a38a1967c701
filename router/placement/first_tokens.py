"""Times to first token: the state of an engine when a prompt is placed on it, predictions, and their correction.

The state of an engine at the moment when a prompt is placed on it, worked out from its last report. Sans-io.

A report is old by a few milliseconds, in which an engine goes on: the step that ran has ended, and the next one has begun with
what was queued, and with what was placed since and has arrived.  So the steps since the report are gone through one by one,
each as long as the learnt curve says.  Steps that only decode are alike; when one of them ends follows from the last event that
came at the end of a step (a first token, or the end of an answer).  Of an engine without such an event half a step is assumed
to be left.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, exp, inf, log
from typing import NamedTuple

import numpy as np

from headrace.broker.messages.events import JobEvent
from headrace.router.index.types import Overlap
from headrace.router.placement.cost import STEP_TOKENS
from headrace.router.placement.disagg_planner import DisaggPlan, uncached_tokens
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Waiting
from headrace.router.placement.worker_view import Floats

MOST_STEPS = 64  # gone through since a report: one that is older says nothing of now anyway
MOST_ALIKE = 64  # steps after an event of which it is known when they end: each is off by a little


class EngineNow(NamedTuple):
    """Work of an engine at the moment when a prompt that is placed now comes there."""

    running_s: float  # left of the step that runs
    before: float  # prompt tokens that no step has begun with
    step_s: float  # seconds of a step beside its prompts
    token_s: float
    step_tokens: float
    slot_wait_s: float  # until a slot is free
    way_s: float = 0.0  # until it comes there

    @property
    def state(self) -> str:
        return "filling" if self.before else "decoding" if self.running_s else "idle"


def engine_now(load: WorkerLoad, now_s: float, *, ended_s: float = -inf, way_s: float = 0.0) -> EngineNow:
    """Describe the engine of a worker by its last report and by what was placed on it since.

    `ended_s`: when a step is known to have ended. `way_s`: what a message takes, either way.
    """
    speed, report = load.speed, load.report
    token_s, step_tokens = 1.0 / speed.prefill_tokens_per_s, float(load.info.step_tokens or STEP_TOKENS)
    step_s = speed.step_s(prefill_tokens=0, decodes=load.running)
    running_s, before = 0.0, float(load.placed_tokens)
    if report is not None:
        comes_s, ends_s = now_s + way_s, load.reported_s - way_s
        queued, decodes = float(report.queued_prefill_tokens), report.running > 0
        decode_s = report.step_s or step_s
        if report.step_prefill_tokens and report.step_s:
            begun = min(queued, report.step_prefill_tokens)
            ends_s += report.step_s * begun / report.step_prefill_tokens
            queued -= begun
            decode_s = step_s
        elif decodes:
            ends_s += _rest_s(decode_s, ends_s, ended_s)
        coming = [(entry.placed_s + way_s, entry.tokens) for entry in load.entries.values()]
        for _ in range(MOST_STEPS):
            if ends_s >= comes_s:
                break  # this step runs then
            while coming and coming[0][0] <= ends_s:
                queued += coming.pop(0)[1]
            if not queued and (not coming or coming[0][0] >= comes_s):
                break  # it decodes, or idles
            if not queued:
                ends_s = coming[0][0]  # that one finds no other there
                continue
            taken = min(queued, step_tokens)
            ends_s += taken * token_s + step_s
            queued, decodes = queued - taken, True
        before = queued + sum(tokens for _, tokens in coming)
        running_s = ends_s - comes_s if ends_s > comes_s else _rest_s(decode_s, comes_s, ended_s) if decodes else 0.0
    slot_wait_s = load.slot_wait_s()
    return EngineNow(running_s, before, step_s, token_s, step_tokens, slot_wait_s if slot_wait_s < inf else 0.0, way_s)


def until_computed_s(engine: EngineNow, tokens: float) -> float:
    """Predict when a prompt of so many uncached tokens is computed, if nothing is placed beside it."""
    own = engine.before + tokens
    begins_s = engine.way_s + engine.running_s + engine.slot_wait_s
    return begins_s + own * engine.token_s + ceil(own / engine.step_tokens) * engine.step_s


def until_last_step_s(engine: EngineNow, tokens: float) -> float:
    """Predict when the step begins that completes such a prompt: until then others can still get into that step."""
    full = ceil((engine.before + tokens) / engine.step_tokens) - 1
    begins_s = engine.way_s + engine.running_s + engine.slot_wait_s
    return begins_s + full * (engine.step_tokens * engine.token_s + engine.step_s)


def _rest_s(decode_s: float, at_s: float, ended_s: float) -> float:
    """Return what is left at a time of the step that runs then, of steps that only decode."""
    if at_s - ended_s > MOST_ALIKE * decode_s:
        return 0.5 * decode_s
    return decode_s - (at_s - ended_s) % decode_s


# Learns by what factor predictions are off, as running medians of measured over predicted seconds. Sans-io.
#
# The median is followed in steps of bounded size, so that one request that took a hundred times as long moves it no further
# than one that took twice as long.

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


# Keeps what a request was told of its first token from being made wrong by the next placement. Sans-io.
#
# An engine fills a step with all prompts that it has, so a prompt of twenty tokens ends with a step of eight thousand if a
# long one is placed beside it before that step begins. Where requests are told apart by their targets, and where one asks for
# a time to first token, the prediction that it was placed by is a promise: until the engine has begun with the step that
# completes it, nothing is placed beside it that makes its first token later by more than a part of the predicted time. A long
# prompt waits for the next step, which is a few milliseconds, and a request that has waited long itself lets much in beside
# it, so that under load steps are as full as they were.

MOST_EACH = 64  # kept on a worker, the last ones: where so many are placed at once, none can be kept
ARRIVAL_S = 0.005  # from a placement until an idle engine has begun with it


class _Promise(NamedTuple):
    """A prompt that no step has begun with, and by how much later its first token may still come."""

    begins_s: float
    slack_s: float


class Promises:
    """The promises on the workers of one router. Times are seconds of the scheduler's clock."""

    def __init__(self, loads: LoadTable, part: float) -> None:
        """`part`: of a predicted time to first token, by which other prompts may make it longer."""
        self._loads = loads
        self._part = part
        self._open: dict[str, list[_Promise]] = {}  # by worker

    def __len__(self) -> int:
        return sum(len(promises) for promises in self._open.values())

    def __bool__(self) -> bool:
        return bool(self._open)

    def note(self, worker: str, *, begins_s: float, takes_s: float, ttft_s: float, now_s: float) -> None:
        """Note a placement: when the engine will begin with it, what it adds to that step, and its time from arrival."""
        left = [one._replace(slack_s=one.slack_s - takes_s) for one in self._current(worker, now_s)[1 - MOST_EACH :]]
        self._open[worker] = [*left, _Promise(begins_s + ARRIVAL_S, self._part * ttft_s)]

    def slack(self, now_s: float) -> Floats:
        """Return by how many seconds the next step of each worker may become longer: infinite where that breaks no promise."""
        slack = np.full(len(self._loads), inf)
        for worker in list(self._open):
            load, left = self._loads.get(worker), self._current(worker, now_s)
            if load is None or not left:
                del self._open[worker]
                continue
            self._open[worker] = left
            slack[load.column] = min(one.slack_s for one in left)
        return slack

    def next_s(self, now_s: float) -> float:
        if not self._open:
            return inf
        return min((one.begins_s for worker in self._open for one in self._current(worker, now_s)), default=inf)

    def _current(self, worker: str, now_s: float) -> list[_Promise]:
        return [one for one in self._open.get(worker, ()) if one.begins_s > now_s]


# Predicts when the prompt of a placed request will be computed, and learns from each one how far that was off. Sans-io.
#
#     seconds = (rest of the running step + steps of the prompts before it and of its own)
#               × what such requests have taken of that
#
# An engine begins with a prompt when its step has ended (`engine_now`). What is in no such model (messages on their way,
# noise, an engine that batches otherwise, prompts that come to be computed beside it) is a factor, learnt as the running
# median of measured over predicted seconds: by fleet, by powers of four of the uncached tokens, and by what the engine was at
# (`Medians`).
#
# Predicted so are requests in a pool of several fleets, and those that ask for a time to first token in any pool; and to
# these it is promised (`Promises`).

MOST_OPEN = 20_000  # placements remembered until their prompts are computed
LEAST_WAY_S = 1e-4  # of a message, either way, until more is learnt
WAY_GAIN = 0.1  # the longest step of that, in parts of it
ASKED_S = 60.0  # after a request that asked for a time, placements of other routers are taken for such


class _Open(NamedTuple):
    bucket: Bucket
    placed_s: float
    seconds: float  # without the factor


class FirstTokens:
    """Predicts for one router. Times are seconds of the scheduler's clock."""

    def __init__(self, loads: LoadTable, settings: SchedulerSettings) -> None:
        self._loads = loads
        self._assumed = settings.calibration.prefill_tokens_per_s
        self._medians = Medians()
        self._open: dict[tuple[str, int], _Open] = {}
        self._ended: dict[str, float] = {}  # by worker: when a step is known to have ended
        self._way_s = LEAST_WAY_S
        self._asked_s = -inf
        self.promises = Promises(loads, settings.promise)

    def __len__(self) -> int:
        return len(self._open)

    def tells(self, request: Waiting) -> bool:
        """Return whether a time to first token is predicted and promised to a request."""
        return request.ttft_target_s is not None or len(self._loads.fleets) > 1

    def foresee(self, request: Waiting, load: WorkerLoad, plan: DisaggPlan, overlap: Overlap, now_s: float) -> DisaggPlan:
        """Return the plan of a request that is placed now with the time to its first token as `predict` has it.

        That of a request to which nothing is told is left as it is.
        """
        if not self.tells(request):
            return plan
        self._asked_s = now_s
        return replace(plan, wait_s=0.0, service_s=self.predict(request, load, plan, overlap, now_s))

    def predict(self, request: Waiting, load: WorkerLoad, plan: DisaggPlan, overlap: Overlap, now_s: float) -> float:
        """Predict the seconds from now until the prompt of a request that is placed now is computed, and remember that."""
        tokens = uncached_tokens(request, overlap)
        if plan.remote:
            seconds = plan.wait_s + plan.service_s
            bucket = bucket_of(load.info.fleet, tokens, "remote")
        else:
            engine = self._engine(load, now_s)
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
        if len(self._loads.fleets) <= 1 and now_s - self._asked_s > ASKED_S:
            return
        load = self._loads.get(event.worker)
        if load is not None and not event.prefill:
            engine, tokens = self._engine(load, now_s), float(event.uncached or event.tokens)
            self._promise(load, engine, tokens, until_computed_s(engine, tokens), now_s)

    def on_event(self, event: JobEvent, now_s: float) -> None:
        """Learn when a prompt is computed; forget the predictions of requests that have ended."""
        kind = event.kind
        if kind == "started":
            found = self._open.get((event.id, event.attempt)) if self._open else None
            if found is not None:
                self._note_way(0.5 * (now_s - found.placed_s))
            return
        if kind not in ("prefilled", "settled", "moved"):
            return
        if kind != "moved":
            self._ended[event.worker] = now_s - self._way_s
        found = self._open.pop((event.id, event.attempt), None) if self._open else None
        if found is not None and kind == "prefilled":
            measured_s = now_s - self._way_s - found.placed_s
            self._medians.observe(found.bucket, predicted_s=found.seconds, measured_s=measured_s)

    def _note_way(self, way_s: float) -> None:
        """Follow the median of what messages take, in steps of bounded size."""
        self._way_s = min(max(way_s, self._way_s * (1 - WAY_GAIN)), self._way_s * (1 + WAY_GAIN) + LEAST_WAY_S)

    def remove_worker(self, worker: str) -> None:
        self._ended.pop(worker, None)

    def _engine(self, load: WorkerLoad, now_s: float) -> EngineNow:
        ended_s = self._ended.get(load.info.worker, -inf)
        return engine_now(load, now_s, ended_s=ended_s, way_s=self._way_s)

    def _promise(self, load: WorkerLoad, engine: EngineNow, tokens: float, ttft_s: float, now_s: float) -> None:
        takes_s = min(tokens, engine.step_tokens) * engine.token_s
        begins_s = now_s + until_last_step_s(engine, tokens)
        self.promises.note(load.info.worker, begins_s=begins_s, takes_s=takes_s, ttft_s=ttft_s, now_s=now_s)
