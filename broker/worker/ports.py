"""The ports through which a worker session uses its engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.requests import EncodeMedia, MediaEncoded
from headrace.broker.prefill_server import PrefillExecutor
from headrace.broker.protocol.run import Run


class Executor(Protocol):
    """Runs what the session starts. All calls are synchronous and come on the event loop."""

    def start(self, run: Run, payload: bytes) -> None:
        """Begin a run or, with emitted tokens in `run.choices`, continue it. Progress is reported to `WorkerRuns`."""

    def stop(self, run: Run) -> None:
        """Abort a run in the engine and free its blocks. Called once for every started run, finished ones too."""

    def resumable(self, run: Run) -> bool:
        """Return whether another worker could continue this run where it stands."""

    def park(self, run: Run) -> None:
        """Stop the engine's sequences and keep the logs: the lease is lost, and enough has been decoded ahead."""

    def unpark(self, run: Run) -> None:
        """Continue a parked run from its log: it is current again. Nothing to do if it was not parked."""

    def load(self, report: LoadReport) -> LoadReport:
        """Fill in the engine's part of a load report."""


class AdapterPort(Protocol):
    async def load(self, name: str, source: str) -> None:
        """Load an adapter; fine when the engine has it from this source already. Raises HeadraceError with the reason."""

    async def unload(self, name: str) -> None:
        """Unload an adapter that no run uses. Raises HeadraceError."""


class EngineOperations(Protocol):
    """The operations of one engine that operators ask for. All raise HeadraceError with the reason if they fail."""

    def check(self, operation: str, *, level: int = 0) -> None:
        """Raise HeadraceError if the engine as started cannot do this: sleep (at a level), pause, reset_cache or profile."""

    async def health(self, *, canary: bool, timeout_s: float) -> tuple[bool, dict[str, Any]]:
        """Return whether the engine can serve, and what was found. With `canary` it is asked for a token, too."""

    async def sleep(self, level: int) -> dict[str, Any]:
        """Free the memory of an engine without sequences. Returns what was measured."""

    async def wake(self, level: int, *, role: str) -> dict[str, Any]:
        """End a sleep and warm the engine up for its role. Returns what was measured."""

    async def pause(self) -> dict[str, Any]:
        """Stop the engine's steps. Its sequences stay."""

    async def resume(self) -> dict[str, Any]:
        """Let the engine go on."""

    async def reset_cache(self) -> dict[str, Any]:
        """Empty the prefix cache."""

    async def profile(self, action: str) -> dict[str, Any]:
        """Start or stop the profiler. Returns where it writes."""

    def set_log_level(self, level: str) -> None:
        """Change the level from which this process logs."""


class EncodePort(Protocol):
    def begin(self, job: EncodeMedia, answer: Callable[[MediaEncoded], None]) -> None:
        """Begin to encode an item. `answer` is called once, at the latest at its end."""


class KvPort(Protocol):
    async def run(self, lease_held: Callable[[], bool]) -> None:
        """Publish until cancelled, only while `lease_held()`."""

    def lease_gained(self) -> None:
        """Publish (again): the lease is held."""

    def lease_lapsed(self) -> None:
        """Note that the lease was lost: readers may have dropped this worker's blocks."""

    def ask_dump(self) -> str:
        """Publish the whole inventory soon. Returns the reason if it cannot, or nothing."""

    @property
    def state(self) -> str:
        """`ok`, or what is wrong, for operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePorts:
    """The engine of one worker as its session uses it.

    Without `kv` no cache events are published, without `prefill` no prompts are computed for other workers, without `encode` no
    media encoded.  `set_role` has the
    engine change its role, and raises HeadraceError if it cannot.  Without `adapters` these are those of the start.  Without
    `operations` operators' commands are refused.
    """

    executor: Executor
    kv: KvPort | None = None
    prefill: PrefillExecutor | None = None
    encode: EncodePort | None = None
    set_role: Callable[[str], Awaitable[None]] | None = None
    adapters: AdapterPort | None = None
    operations: EngineOperations | None = None
