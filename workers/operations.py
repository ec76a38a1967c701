"""Operations and health of a started engine, for operators and orchestrators.

A sleep reports what it has freed as the difference of two measurements, not as what the engine meant to free.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from headrace.broker.models.cards import ModelCard
from headrace.broker.part_state import PartState, Standing
from headrace.broker.worker.session import WorkerSession
from headrace.workers import metrics
from headrace.workers.blocking import run_in_thread
from headrace.workers.engine import Engine, EngineInfo, Load
from headrace.workers.errors import EngineError, UnsupportedByEngine, WorkerError
from headrace.workers.probes import EngineProbe
from headrace.workers.process_guard import descendants
from headrace.workers.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory in bytes. `device` is that of all devices together, other processes included; None = no device can be read."""

    host: int
    device: int | None = None

    def freed_until(self, later: MemoryUse) -> dict[str, int]:
        """Return the bytes that have been freed from this measurement to a later one, below 0 for a growth."""
        freed = {"host_bytes_freed": self.host - later.host}
        if self.device is not None and later.device is not None:
            freed["device_bytes_freed"] = self.device - later.device
        return freed

    def report(self) -> dict[str, int]:
        return {"host_bytes": self.host, **({"device_bytes": self.device} if self.device is not None else {})}


def measure() -> MemoryUse:
    """Measure this process with all its descendants. Blocks for some milliseconds."""
    pids = [os.getpid(), *(pid for pid, _ in descendants(os.getpid()))]
    return MemoryUse(sum(map(_host_bytes, pids)), _device_bytes())


def _host_bytes(pid: int) -> int:
    """Return a process's share of the memory that it maps: pages of several processes count once among them."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) << 10
    return 0  # it has ended, or this system has no such file


def _device_bytes() -> int | None:
    try:
        import pynvml
    except ImportError:
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return sum(int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


_WHY = {"role": "changes its role", "sleep": "sleeps", "pause": "is paused"}


class WorkerHealth:
    """Publishes the standing of one worker while `run` runs."""

    def __init__(
        self, state: PartState, session: WorkerSession, engine: Engine, runtime: Runtime, info: EngineInfo, card: ModelCard
    ) -> None:
        self._state = state
        self._session = session
        self._engine = engine
        self._runtime = runtime
        self._info = info
        self._card = card

    async def run(self) -> None:
        await self._state.keep(self.describe)

    def describe(self) -> Standing:
        """Describe the worker now. Ready: it takes work. Healthy: it does, or does not by an operator's will."""
        state, dead = self._session.presence, self._runtime.dead
        if dead.done():
            why = f"the engine is dead: {dead.result()}"
        elif not self._session.presence.lease.held:
            why = "it holds no lease"
        elif state.draining:
            why = "draining"
        else:
            why = _WHY.get(state.withdrawn, "")
        willed = not dead.done() and bool(state.draining or state.withdrawn)
        return Standing(ready=not why, healthy=not why or willed, why=why, facts=self._facts())

    def _facts(self) -> dict[str, Any]:
        session, member, load = self._session, self._session.presence.member, self._engine.load()
        show_load(load)
        prefill = session.prefill_server.states() if session.prefill_server is not None else {}
        return {
            "worker": member.worker,
            "pool": member.pool,
            "model": self._card.model,
            "kinds": self._card.kinds,
            "role": member.role,
            "engine": f"{self._info.engine} {self._info.version}".rstrip(),
            **parallel_facts(self._info),
            "lease_held": session.presence.lease.held,
            "runs": len(session.runs.table),
            "slots": member.slots,
            **({"prefills": prefill} if member.role == "prefill" else {}),
            "load": load_facts(load),
            **({"ranks": [load_facts(rank) for rank in load.ranks]} if load.ranks else {}),
            **self._runtime.watchdog.report(),
        }


def parallel_facts(info: EngineInfo) -> dict[str, dict[str, int]]:
    """Return the ranks that share the model, by kind, as orchestrators and operators see them."""
    return {"parallel": dict(info.parallel)} if info.parallel else {}


def show_load(load: Load) -> None:
    """Set the gauges of the engine's load, a value per data-parallel rank."""
    for rank, part in enumerate(load.ranks or (load,)):
        metrics.ENGINE_RUNNING.labels(str(rank)).set(part.running)
        metrics.ENGINE_WAITING.labels(str(rank)).set(part.waiting)
        metrics.ENGINE_BLOCKS_USED.labels(str(rank)).set(part.blocks_used)
        metrics.ENGINE_BLOCKS.labels(str(rank)).set(part.blocks_total)


def load_facts(load: Load) -> dict[str, int]:
    """Return the load as orchestrators and operators see it."""
    return {name: getattr(load, name) for name in ("running", "waiting", "blocks_used", "blocks_total")}


# Operates a started engine for its worker's session: health, sleep, pause, prefix cache, profiler and log level.
#
# It knows engines by their declared operations only, and measures what a sleep frees itself.

log = structlog.get_logger()

CALL_S = 120.0  # an operation of the engine
LOAD_S = 900.0  # waking: weights may have to be read again

NEEDED = {
    "sleep": frozenset({"sleep", "wake"}),
    "pause": frozenset({"pause", "resume"}),
    "reset_cache": frozenset({"reset_prefix_cache"}),
    "profile": frozenset({"start_profile", "stop_profile"}),
}
"""What the engine must declare for an operator's command."""

SetLogLevel = Callable[[str], None]


class EngineOperator:
    """Implements `headrace.broker.worker.ports.EngineOperations`."""

    def __init__(
        self,
        engine: Engine,
        runtime: Runtime,
        info: EngineInfo,
        probe: EngineProbe,
        *,
        warm: Callable[[str], Awaitable[None]],
        set_log_level: SetLogLevel | None = None,
    ) -> None:
        """`warm` warms the engine up for a role after a sleep. Without `set_log_level` the level cannot be changed."""
        self._engine = engine
        self._runtime = runtime
        self._info = info
        self._probe = probe
        self._warm = warm
        self._set_log_level = set_log_level
        self._loop = asyncio.get_running_loop()

    def check(self, operation: str, *, level: int = 0) -> None:
        able = self._engine.capabilities
        if not NEEDED[operation] <= able.operations:
            raise UnsupportedByEngine(f"{self._name} as it was started cannot do this: {operation}{self._hint(operation)}")
        if operation == "sleep" and level not in able.sleep_levels:
            levels = ", ".join(map(str, able.sleep_levels)) or "none"
            raise UnsupportedByEngine(f"{self._name} as it was started has no sleep level {level}; it has: {levels}")

    @property
    def _name(self) -> str:
        return f"the engine {self._info.engine} {self._info.version}".rstrip()

    def _hint(self, operation: str) -> str:
        from headrace.workers.engine_registry import NAMES, support_of

        if self._info.engine not in NAMES:
            return ""
        support = support_of(self._info.engine)
        words = [f"operation {name}" for name in sorted(NEEDED[operation])]
        if not all(word in support.words for word in words):
            return f"; the adapter for {support.title} offers no such operation"
        needs = next((support.conditions[word] for word in words if word in support.conditions), "")
        return f"; it can when started with {needs}" if needs else ""

    async def health(self, *, canary: bool, timeout_s: float) -> tuple[bool, dict[str, Any]]:
        report: dict[str, Any] = {"engine": self._info.engine, "version": self._info.version, **parallel_facts(self._info)}
        dead = self._runtime.dead
        if dead.done():
            return False, {**report, "alive": False, "why": dead.result()}
        report |= {"alive": True, **self._runtime.watchdog.report()}
        report["load"] = load_facts(self._engine.load())
        why = ""
        try:
            async with asyncio.timeout(timeout_s):
                await self._engine.healthy()
                if canary:
                    async with self._runtime.exclusive:
                        report["canary_s"] = round(await self._probe.ask(), 4)
        except TimeoutError:
            why = f"the engine did not answer within {timeout_s:g} s"
        except WorkerError as error:
            why = str(error)
        return not why, {**report, **({"why": why} if why else {})}

    async def sleep(self, level: int) -> dict[str, Any]:
        async with self._runtime.exclusive:
            self._runtime.watchdog.suspend()  # an engine that sleeps makes no steps
            before = await run_in_thread(measure, name="memory")
            began = self._loop.time()
            try:
                await self._call("sleep", {"level": level})
            except WorkerError:
                self._runtime.watchdog.resume()
                raise
            took_s = self._loop.time() - began
            after = await run_in_thread(measure, name="memory")
        report = {"level": level, "took_s": round(took_s, 3), **before.freed_until(after), **after.report()}
        log.info("engine.asleep", **report)
        return report

    async def wake(self, level: int, *, role: str) -> dict[str, Any]:
        async with self._runtime.exclusive:
            began = self._loop.time()
            await self._call("wake", {"level": level}, within_s=LOAD_S)
            woken_s = self._loop.time() - began
            self._runtime.watchdog.resume()
            await self._warm(role)
            took_s = self._loop.time() - began
        report = {"woken_s": round(woken_s, 3), "warm_s": round(took_s - woken_s, 3)}
        log.info("engine.awake", **report)
        return report

    async def pause(self) -> dict[str, Any]:
        async with self._runtime.exclusive:
            self._runtime.suspend()
            try:
                await self._call("pause", {"mode": "keep"})
            except WorkerError:
                self._runtime.resume()
                raise
        return {}

    async def resume(self) -> dict[str, Any]:
        async with self._runtime.exclusive:
            await self._call("resume", {})
            self._runtime.resume()
        return {}

    async def reset_cache(self) -> dict[str, Any]:
        answer = await self._call("reset_prefix_cache", {})
        if answer.get("result", answer.get("ok")) is False:
            raise EngineError(
                f"{self._name} keeps its prefix cache while sequences use it; pause with a grace period, or try again when idle"
            )
        return {}

    async def profile(self, action: str) -> dict[str, Any]:
        return dict(await self._call(f"{action}_profile", {}))

    def set_log_level(self, level: str) -> None:
        if self._set_log_level is None:
            raise UnsupportedByEngine("the log level of this process cannot be changed")
        try:
            self._set_log_level(level)
        except (KeyError, ValueError):
            raise UnsupportedByEngine(f"there is no log level {level!r}; there are debug, info, warning, error") from None

    async def _call(self, operation: str, args: Mapping[str, Any], *, within_s: float = CALL_S) -> Mapping[str, Any]:
        """Have the engine do this. Raises EngineError when it does not end in time, or fails in a way of its own.

        Meanwhile no steps are expected: an engine may make none while it writes a profile, say.
        """
        self._runtime.watchdog.suspend()
        try:
            async with asyncio.timeout(within_s):
                return await self._engine.control(operation, args)
        except TimeoutError:
            raise EngineError(f"{operation} did not end within {within_s:g} s") from None
        except WorkerError:
            raise
        except Exception as error:  # what an engine raises of its own must not end the worker
            log.exception("engine.operation_failed", operation=operation)
            raise EngineError(f"{operation} failed in {self._name}: {error}") from error
        finally:
            self._runtime.watchdog.resume()
