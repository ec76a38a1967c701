"""A scripted engine under a real WorkerSession: it steps at random times, checks what it is given, and dies of poison."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.frames import Finish, JobFault
from headrace.broker.protocol.run import Run, RunState
from headrace.broker.worker.session import WorkerSession
from tests.simulation.protocol.requests import Pipeline, RunNote, Wish, token
from tests.simulation.virtual.machine import Machine

STEPS_S = (0.05, 0.05, 0.3)


@dataclass(eq=False, slots=True)
class Work:
    """What runs in the engine."""

    run: Run
    note: RunNote
    wish: Wish
    fuse: int  # steps until poison goes off
    open: list[int]
    pipelines: list[Pipeline] = field(default_factory=list)


class SimEngine:
    """Implements `headrace.broker.worker.ports.Executor`. `begin` notes a start and checks that it was allowed."""

    def __init__(self, machine: Machine, begin: Callable[[SimEngine, Run, bytes], tuple[RunNote, Wish]]) -> None:
        self.machine = machine
        self.session: WorkerSession | None = None
        self.running: dict[Run, Work] = {}
        self.parked: set[Run] = set()
        self.deaths: list[tuple[set[str], str]] = []
        self.on_poison: Callable[[str], None] = lambda request_id: None
        self.flaky = 0  # how many steps will fail
        self.still_until_s = 0.0  # it takes requests and makes nothing until then
        self.dead = False
        self._begin = begin

    # -- the session's side -------------------------------------------------------------------------------------

    def start(self, run: Run, payload: bytes) -> None:
        note, wish = self._begin(self, run, payload)
        work = Work(
            run, note, wish, self.machine.rng.randint(0, 2), [i for i, log in enumerate(run.choices) if not log.settled]
        )
        for log in run.choices:
            pipeline = Pipeline()
            for token_id in log.ids:
                pipeline.push(token_id)
            work.pipelines.append(pipeline)
        self.running[run] = work

    def stop(self, run: Run) -> None:
        self.running.pop(run, None)
        self.parked.discard(run)

    def resumable(self, run: Run) -> bool:
        return True

    def park(self, run: Run) -> None:
        self.parked.add(run)

    def unpark(self, run: Run) -> None:
        self.parked.discard(run)

    def load(self, report: LoadReport) -> LoadReport:
        return report

    # -- time ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Step until the engine dies."""
        session = self.session
        assert session is not None
        while True:
            await asyncio.sleep(max(self.machine.rng.choice(STEPS_S), self.still_until_s - self.machine.world.now))
            for work in list(self.running.values()):
                if work.run in self.parked or work.run not in self.running:
                    continue
                if work.wish.poison and self._explodes(work):
                    self.on_poison(work.run.id)
                    if work.wish.poison == "worker":
                        self.machine.crash()
                        return
                    await self.die()
                    return
                if self.flaky:
                    self.flaky -= 1
                    session.runs.retry_elsewhere(work.run, JobFault("engine_busy", "try elsewhere", retriable=True))
                    continue
                self._step(session, work)
            session.runs.flush()

    async def die(self) -> None:
        """The engine process is gone; the worker process is not."""
        assert self.session is not None
        self.deaths.append(({run.id for run in self.running}, self.machine.id))
        self.running.clear()
        self.dead = True
        await self.session.service.engine_died("it was told to")

    def _explodes(self, work: Work) -> bool:
        last = all(len(work.run.choices[c].ids) >= work.wish.lengths[c] - 1 for c in work.open)
        work.fuse -= 1
        return work.fuse < 0 or last

    def _step(self, session: WorkerSession, work: Work) -> None:
        run = work.run
        if run.state is not RunState.RUNNING and run.state is not RunState.LAPSED:
            return
        if work.wish.invalid:
            session.runs.fail(run, JobFault("invalid_request", "no", param="temperature"))
            return
        for choice in list(work.open):
            have, total = len(run.choices[choice].ids), work.wish.lengths[choice]
            n = min(total, have + self.machine.rng.randint(1, 2)) - have
            ids = [token(work.note.tag, choice, have + i) for i in range(n)]
            texts = [work.pipelines[choice].push(i) for i in ids]
            fin = None
            if have + n >= total:
                work.open.remove(choice)
                fin = Finish(
                    reason="length",
                    tail=work.pipelines[choice].finish(),
                    prompt_tokens=run.envelope.tokens,
                    completion_tokens=total,
                )
            session.runs.append(run, choice, ids, texts, fin=fin)
