"""A scripted executor for protocol tests: no engine, tokens are a pure function of the request and the position.

It stands in for workers/runtime/runtime.py where the protocol alone is under test; the real runtime has tests of its own.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass, field

from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.frames import Finish
from headrace.broker.protocol.run import Run
from headrace.broker.worker.session import WorkerSession


def token(request_id: str, choice: int, position: int) -> int:
    """What every run of this request must produce at this position."""
    return zlib.crc32(f"{request_id}/{choice}/{position}".encode()) & 0xFFFF


def expected(request_id: str, choice: int, n: int) -> list[int]:
    return [token(request_id, choice, i) for i in range(n)]


@dataclass
class ScriptedExecutor:
    """Produces `envelope.max_tokens` tokens per choice, a step every `step_s`."""

    step_s: float = 0.01
    burst: int = 1
    session: WorkerSession | None = None
    running: dict[Run, set[int]] = field(default_factory=dict)
    parked: set[Run] = field(default_factory=set)
    started: list[str] = field(default_factory=list)

    def start(self, run: Run, payload: bytes) -> None:
        self.started.append(run.id)
        self.running[run] = {i for i, log in enumerate(run.choices) if not log.settled}

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

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            self.step()

    def step(self) -> None:
        assert self.session is not None
        for run, choices in list(self.running.items()):
            if run in self.parked:
                continue
            for choice in list(choices):
                have = len(run.choices[choice].ids)
                total = run.envelope.max_tokens
                ids = [token(run.id, choice, i) for i in range(have, min(total, have + self.burst))]
                fin = None
                if have + len(ids) >= total:
                    choices.discard(choice)
                    fin = Finish(reason="length", prompt_tokens=run.envelope.tokens, completion_tokens=total)
                self.session.runs.append(run, choice, ids, [f"{i} " for i in ids], fin=fin)
        self.session.runs.flush()
