"""Between the worker session, which knows the protocol, and the runtime, which knows the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.broker.messages import LoadReport
from headrace.broker.protocol.run import Run


class Executor(Protocol):
    """Runs what the session starts. All calls are synchronous and come on the event loop."""

    def start(self, run: Run, payload: bytes) -> None:
        """Begin (or, with emitted tokens in `run.choices`, continue). Progress is reported to `WorkerSession.append`."""

    def stop(self, run: Run) -> None:
        """Abort whatever still runs for it and free its blocks. Called once for every started run, finished ones too."""

    def resumable(self, run: Run) -> bool:
        """Another worker could go on with it where it stands."""

    def park(self, run: Run) -> None:
        """The lease is lost and enough has been decoded ahead: stop the engine's sequences, keep the logs."""

    def unpark(self, run: Run) -> None:
        """The run is current again: continue what was parked from its log. Nothing to do if it was not."""

    def load(self, report: LoadReport) -> LoadReport:
        """Fill in the engine's part of a load report."""


class AdapterPort(Protocol):
    """The engine's adapters, as the session changes them while it serves."""

    async def load(self, name: str, source: str) -> None:
        """Raises HeadraceError saying why the engine does not have it. Fine when it has it from there already."""

    async def unload(self, name: str) -> None:
        """No run is on it. Raises HeadraceError."""


class KvPort(Protocol):
    """A worker's cache events on their way into the stream, as the session sees them."""

    async def run(self, lease_held: Callable[[], bool]) -> None:
        """Publish until cancelled, only while `lease_held()`."""

    def lease_gained(self) -> None:
        """The lease is held (again)."""

    def lease_lapsed(self) -> None:
        """The lease was lost: readers may have given this worker's blocks up."""

    def ask_dump(self) -> str:
        """Publish the whole inventory soon. Returns why not, or nothing."""

    @property
    def state(self) -> str:
        """For operators: `ok`, or what is wrong."""
