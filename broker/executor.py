"""Between the worker session, which knows the protocol, and the runtime, which knows the engine."""

from __future__ import annotations

from typing import Protocol

from broker.messages import LoadReport
from broker.protocol.runs import Run


class Executor(Protocol):
    """Runs what the session starts. All calls are synchronous and come on the event loop."""

    def start(self, run: Run, payload: bytes) -> None:
        """Begin (or, with emitted tokens in `run.choices`, continue). Progress is reported to `WorkerSession.append`."""

    def stop(self, run: Run) -> None:
        """Abort whatever still runs for it and free its blocks. Called once for every started run, finished ones too."""

    def park(self, run: Run) -> None:
        """The lease is lost and enough has been decoded ahead: stop the engine's sequences, keep the logs."""

    def unpark(self, run: Run) -> None:
        """The run is current again: continue what was parked from its log. Nothing to do if it was not."""

    def load(self, report: LoadReport) -> LoadReport:
        """Fill in the engine's part of a load report."""
