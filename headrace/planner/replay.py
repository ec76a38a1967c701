"""Replays recorded requests in virtual time, with the planner and with fixed numbers of workers."""

from __future__ import annotations

import csv
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import msgspec

from headrace.base.errors import CommandError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Routed
from headrace.config.options import PlannerSettings
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.planner.capacity import Speed
from headrace.planner.observe import Observation, OutcomeSight, RequestSight, StepSight, WorkerSight
from headrace.planner.plan import Action
from headrace.planner.pool_planner import PoolPlanner

STEP_TOKENS = 2048


@dataclass(slots=True)
class Request:
    """A request of the past and what became of it. Times are seconds of the replay."""

    at: float
    prompt: int
    uncached: int
    output: int
    placed_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None
    done: int = 0  # tokens of output
    left: int = 0  # prompt tokens to compute

    @property
    def ttft_s(self) -> float:
        """Time from its arrival to its first token, infinite while it has none."""
        return float("inf") if self.first_s is None else self.first_s - self.at

    @property
    def itl_s(self) -> float:
        """Mean time between its tokens, infinite before its end."""
        if self.first_s is None or self.end_s is None:
            return float("inf")
        return (self.end_s - self.first_s) / (self.output - 1) if self.output > 1 else 0.0


@dataclass(slots=True)
class Engine:
    """An engine that serves from `ready_s` on. `busy_s`: end of the step that runs."""

    name: str
    speed: Speed
    slots: int
    began_s: float
    ready_s: float
    draining: bool = False
    running: list[Request] = field(default_factory=list)
    prefills: deque[Request] = field(default_factory=deque)
    step: tuple[float, list[Request], list[Request]] | None = None  # end, those that decode, those that are prefilled
    last: StepSight | None = None

    @property
    def held(self) -> int:
        return len(self.running) + len(self.prefills) + (len(self.step[2]) if self.step is not None else 0)

    def sight(self, start_s: float) -> WorkerSight:
        return WorkerSight(
            worker=self.name,
            role="aggregated",
            state="draining" if self.draining else "serving",
            slots=self.slots,
            running=self.held,
            queued_prefill_tokens=sum(one.left for one in self.prefills),
            report_age_s=0.2,
            start_s=start_s,
        )

    def has_room(self, now_s: float) -> bool:
        """Return whether it takes one more: a slot is free, and less than a step of prompt waits."""
        if self.draining or now_s < self.ready_s or self.held >= self.slots:
            return False
        return sum(one.left for one in self.prefills) < STEP_TOKENS

    def take(self, request: Request, now_s: float) -> None:
        request.placed_s, request.left = now_s, max(1, request.uncached)
        self.prefills.append(request)

    def begin(self, now_s: float) -> float | None:
        """Begin a step and return its end, None if there is nothing to do or one runs."""
        if self.step is not None or not self.held:
            return None
        budget, prefilled, computed = STEP_TOKENS - len(self.running), [], 0
        while self.prefills and computed < budget:
            first = self.prefills[0]
            part = min(first.left, budget - computed)
            first.left -= part
            computed += part
            if first.left:
                break
            prefilled.append(self.prefills.popleft())
        context = sum(one.prompt + one.done for one in self.running)
        took_s = self.speed.took_s(computed, len(self.running), context)
        self.step = (now_s + took_s, list(self.running), prefilled)
        self.last = StepSight(step_s=took_s, prefill_tokens=computed, decodes=len(self.running), context_tokens=context)
        return now_s + took_s

    def finish(self) -> list[Request]:
        if self.step is None:
            return []
        end_s, decoded, prefilled = self.step
        self.step = None
        for one in prefilled:
            one.first_s, one.done = end_s, 1
            self.running.append(one)
        for one in decoded:
            one.done += 1
        ended = [one for one in self.running if one.done >= one.output]
        for one in ended:
            one.end_s = end_s
        self.running = [one for one in self.running if one.end_s is None]
        return ended


Decide = Callable[[Observation], Iterable[Action]]
AFTER_S = 3600.0  # after the last arrival; what has not ended then, never does


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    speed: Speed
    slots: int = 64
    start_s: float = 60.0
    tick_s: float = 5.0
    first: int = 1  # engines that serve at the beginning
    began_unix_s: float = 1_700_000_000.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of a replay. Worker-hours count engines that start or drain, too."""

    requests: Sequence[Request]
    worker_s: float = 0.0
    changes: list[tuple[float, int]] = field(default_factory=list)  # when the number changed, and by what
    most: int = 0
    until_s: float = 0.0

    @property
    def failed(self) -> int:
        return sum(one.end_s is None for one in self.requests)

    def attained(self, *, ttft_s: float, itl_s: float) -> float:
        """Return the share of requests that met both targets."""
        met = sum(one.ttft_s <= ttft_s and one.itl_s <= itl_s for one in self.requests)
        return met / max(1, len(self.requests))

    @property
    def starts(self) -> int:
        return sum(sign > 0 for _, sign in self.changes)

    @property
    def drains(self) -> int:
        return len(self.changes) - self.starts


class World:
    """A pool of one model, from the first request to the end of the last one."""

    def __init__(self, requests: Sequence[Request], settings: WorldSettings, decide: Decide) -> None:
        """`requests` in the order of their arrival. `decide` is asked every tick."""
        self._arrivals = deque(requests)
        self._settings = settings
        self._decide = decide
        self._queue: deque[Request] = deque()
        self._engines: dict[str, Engine] = {}
        self._started = 0
        self._steps: list[tuple[float, int, str]] = []
        self._serial = 0
        self._seen = 0
        self._placed: list[Request] = []
        self._outputs: list[int] = []
        self._ended: list[OutcomeSight] = []
        self.outcome = Outcome(requests=requests)
        for _ in range(settings.first):
            self._start(0.0, ready_s=0.0)

    def run(self) -> Outcome:
        last_s = self._arrivals[-1].at if self._arrivals else 0.0
        tick_s = 0.0
        while True:
            arrival_s = self._arrivals[0].at if self._arrivals else float("inf")
            step_s = self._steps[0][0] if self._steps else float("inf")
            now_s = min(arrival_s, step_s, tick_s)
            if now_s > last_s + AFTER_S or (
                now_s > last_s and not self._queue and not any(e.held for e in self._engines.values())
            ):
                break
            if now_s == step_s:
                self._finish(heapq.heappop(self._steps)[2], now_s)
            elif now_s == arrival_s:
                self._queue.append(self._arrivals.popleft())
                self._seen += 1
            else:
                self._tick(now_s)
                tick_s += self._settings.tick_s
            self._place(now_s)
        self.outcome.until_s = max(last_s, now_s)
        self.outcome.worker_s += sum(self.outcome.until_s - one.began_s for one in self._engines.values())
        return self.outcome

    def _tick(self, now_s: float) -> None:
        seen = self._observe(now_s)
        for action in self._decide(seen):
            if action.kind == "start":
                self._start(now_s, ready_s=now_s + self._settings.start_s)
                self.outcome.changes.append((now_s, 1))
            elif action.kind == "drain" and action.worker in self._engines:
                self._engines[action.worker].draining = True
                self.outcome.changes.append((now_s, -1))
                self._leave(action.worker, now_s)

    def _start(self, now_s: float, *, ready_s: float) -> None:
        self._started += 1
        name = f"w{self._started}"
        self._engines[name] = Engine(name, self._settings.speed, self._settings.slots, now_s, ready_s)
        self.outcome.most = max(self.outcome.most, len(self._engines))

    def _leave(self, name: str, now_s: float) -> None:
        engine = self._engines[name]
        if engine.draining and not engine.held:
            self.outcome.worker_s += now_s - engine.began_s
            del self._engines[name]

    def _place(self, now_s: float) -> None:
        while self._queue:
            able = [one for one in self._engines.values() if one.has_room(now_s)]
            if not able:
                break
            best = min(able, key=lambda one: (sum(p.left for p in one.prefills), one.held))
            request = self._queue.popleft()
            best.take(request, now_s)
            self._placed.append(request)
            self._begin(best, now_s)

    def _begin(self, engine: Engine, now_s: float) -> None:
        end_s = engine.begin(now_s)
        if end_s is not None:
            self._serial += 1
            heapq.heappush(self._steps, (end_s, self._serial, engine.name))

    def _finish(self, name: str, now_s: float) -> None:
        engine = self._engines[name]
        for one in engine.finish():
            self._outputs.append(one.output)
            self._ended.append(OutcomeSight(ttft_s=one.ttft_s, itl_s=one.itl_s))
        self._begin(engine, now_s)
        self._leave(name, now_s)

    def _observe(self, now_s: float) -> Observation:
        engines = [one for one in self._engines.values() if one.ready_s <= now_s]
        seen = Observation(
            at=self._settings.began_unix_s + now_s,
            model="m",
            pool="m",
            arrived=self._seen,
            waiting=len(self._queue),
            workers=tuple(one.sight(self._settings.start_s) for one in engines),
            placed=tuple(
                RequestSight(prompt=one.prompt, uncached=one.uncached, waited_s=(one.placed_s or now_s) - one.at)
                for one in self._placed
            ),
            outputs=tuple(self._outputs),
            ended=tuple(self._ended),
            steps=tuple(one.last for one in engines if one.last is not None),
        )
        self._seen, self._placed, self._outputs, self._ended = 0, [], [], []
        return seen


AT_ONCE = 1000


async def read_placements(messaging: Messaging, names: Subjects, *, since_s: float, output: int) -> dict[str, list[Request]]:
    """Return first placements since a Unix time, by queue. Lengths of answers are in no record.

    `output`: tokens that each answer is assumed to have, at most those that it was allowed.
    """
    found: dict[str, list[tuple[float, Routed]]] = {}
    next_seq, stream = 1, names.stream("ROUTE")
    while batch := await messaging.subject_messages(stream, f"{names.prefix}.route.*", limit=AT_ONCE, start_seq=next_seq):
        next_seq = batch[-1].seq + 1
        for message in batch:
            try:
                record = decode(Routed, message.data)
            except WireError:
                continue
            if record.attempt == 1 and record.at - record.waited_s >= since_s:
                queue = message.subject.rpartition(".")[2]
                found.setdefault(queue, []).append((record.at - record.waited_s, record))
    return {
        queue: from_start(
            (at, one.tokens, one.uncached, min(output, one.max_tokens) if one.max_tokens else output) for at, one in records
        )
        for queue, records in found.items()
    }


def read_trace(path: Path) -> list[Request]:
    """Read a CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens, as the Azure traces have them.

    Raises CommandError for a file that is none.
    """
    try:
        with path.open(newline="") as lines:
            return from_start(_row(row) for row in csv.DictReader(lines))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path} is no trace: {type(error).__name__}: {error}") from error


def _row(row: Mapping[str, str]) -> tuple[float, int, int, int]:
    at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
    return at, int(row["ContextTokens"]), int(row["ContextTokens"]), int(row["GeneratedTokens"])


def from_start(rows: Iterable[tuple[float, int, int, int]]) -> list[Request]:
    """Return requests in the order of arrival, with times since the first one."""
    ordered = sorted(rows)
    return [
        Request(at=at - ordered[0][0], prompt=max(1, prompt), uncached=max(0, uncached), output=max(1, output))
        for at, prompt, uncached, output in ordered
    ]


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the comparison. `attained`: the share of requests within both targets."""

    who: str
    attained: float
    worker_hours: float
    most: int
    starts: int
    drains: int


def play_planner(requests: Sequence[Request], settings: PlannerSettings, world: WorldSettings) -> tuple[Played, dict[str, int]]:
    """Play with the planner. Returns the line, and how often it had each reason."""
    planner, reasons = PoolPlanner(settings, profile={"aggregated": world.speed}), Counter[str]()

    def decide(seen: Observation) -> Iterable[Action]:
        plan = planner.tick(seen)
        planner.acted(plan)
        reasons[plan.reason] += 1
        return plan.actions

    return _play("planner", requests, settings, world, decide), dict(reasons)


def play_fixed(requests: Sequence[Request], settings: PlannerSettings, world: WorldSettings) -> list[Played]:
    """Play with 1, 2, 3 … workers that are always there, until one number has what the planner is asked for."""
    found: list[Played] = []
    for count in range(1, settings.most + 1):
        found.append(_play(f"always {count}", requests, settings, replace(world, first=count), lambda _seen: ()))
        if found[-1].attained >= 1.0 - settings.miss:
            break
    return found


def _play(who: str, requests: Sequence[Request], settings: PlannerSettings, world: WorldSettings, decide: Decide) -> Played:
    outcome = World([copy(one) for one in requests], world, decide).run()
    return Played(
        who=who,
        attained=outcome.attained(ttft_s=settings.ttft_s, itl_s=settings.itl_s),
        worker_hours=outcome.worker_s / 3600,
        most=outcome.most,
        starts=outcome.starts,
        drains=outcome.drains,
    )
