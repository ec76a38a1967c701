"""Simulates a pool in virtual time: one queue, engines that start and drain, and a decision about their number at each tick."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.planner.actions import Action
from headrace.planner.observation import Observation, OutcomeSight, RequestSight, WorkerSight
from headrace.planner.replay.engines import Engine, Request
from headrace.planner.speed_curve import Speed

Decide = Callable[[Observation], Iterable[Action]]
AFTER_S = 3600.0  # after the last arrival; what has not ended then, never does


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    """The machines of the replay."""

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
    drains: int = 0
    until_s: float = 0.0

    @property
    def failed(self) -> int:
        """Requests that had no end."""
        return sum(one.end_s is None for one in self.requests)

    def attained(self, *, ttft_s: float, itl_s: float) -> float:
        """Return the share of requests that met both targets."""
        met = sum(one.met(ttft_s=ttft_s, itl_s=itl_s) for one in self.requests)
        return met / max(1, len(self.requests))


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
        """Run to the end and return what became of it."""
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
                self.outcome.drains += 1
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
            workers=tuple(self._sight(one) for one in engines),
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

    def _sight(self, engine: Engine) -> WorkerSight:
        return WorkerSight(
            worker=engine.name,
            role="aggregated",
            state="draining" if engine.draining else "serving",
            slots=engine.slots,
            running=engine.held,
            queued_prefill_tokens=sum(one.left for one in engine.prefills),
            report_age_s=0.2,
            start_s=self._settings.start_s,
        )
