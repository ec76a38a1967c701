"""The simulator's control operations (docs/simulator.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.workers.errors import EngineError, RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.events import EventBuffer
from headrace.workers.sim.fabric_member import FabricMember
from headrace.workers.sim.profile import StepTrace
from headrace.workers.sim.scheduler import SimScheduler
from headrace.workers.sim.sleep import Sleeper, sleep_args
from headrace.workers.sim.step_driver import StepDriver

HANDOVER_OPERATION = "release_handover"  # of engines that hand over
ADAPTER_OPERATIONS = frozenset({"load_adapter", "unload_adapter"})  # of engines that generate
PROFILE_OPERATIONS = frozenset({"start_profile", "stop_profile"})  # of engines with a folder for profiles
OPERATIONS = ADAPTER_OPERATIONS | PROFILE_OPERATIONS
OPERATIONS |= {"reset_prefix_cache", "stats", "replay_kv_events", HANDOVER_OPERATION, "sleep", "wake"}
OPERATIONS |= {"pause", "resume", "is_paused"}


class Operations:
    """The control operations of one started engine."""

    def __init__(
        self,
        scheduler: SimScheduler,
        driver: StepDriver,
        events: EventBuffer,
        *,
        adapters: dict[str, str],
        member: FabricMember | None,
    ) -> None:
        """`adapters`: name → where it was loaded from; changed in place."""
        self._scheduler = scheduler
        self._driver = driver
        self._sleeper = Sleeper(scheduler, driver)
        self._events = events
        self._adapters = adapters
        self._member = member

    async def do(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run an operation. Raises UnsupportedByEngine for an unknown one, RequestInvalid for wrong arguments."""
        match op:
            case "reset_prefix_cache":
                self._scheduler.manager.clear()
                self._driver.wake()
                return {"ok": True}
            case "load_adapter":
                self._load_adapter(args["name"], args["source"])
                return {}
            case "unload_adapter":
                self._adapters.pop(args["name"], None)
                return {}
            case "stats":
                return self._scheduler.stats()
            case "replay_kv_events":
                return self._events.replay_from(args.get("from", 0))
            case "release_handover":
                if self._member is None:
                    raise UnsupportedByEngine("release_handover: this simulator takes no hand-overs (disagg)")
                return {"released": self._member.release(args)}
            case "sleep":
                return await self._sleeper.sleep(sleep_args(args))
            case "wake":
                self._sleeper.wake()
                return {"level": 0}
            case "pause":
                return self._pause(args)
            case "resume":
                self._driver.resume()
                return {}
            case "is_paused":
                return {"result": self._driver.paused}
            case "start_profile" | "stop_profile":
                return self._profile(op)
        raise UnsupportedByEngine(f"the simulator has no operation {op!r}")

    def _pause(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin no step any more, and keep the sequences; the only mode that there is."""
        if args.get("mode", "keep") != "keep":
            raise RequestInvalid(f"pause: this simulator keeps its sequences (mode keep), it has no mode {args['mode']!r}")
        self._driver.pause()
        return {}

    def _profile(self, op: str) -> Mapping[str, Any]:
        folder, trace = self._scheduler.settings.profile_dir, self._driver.trace
        if not folder:
            raise UnsupportedByEngine(f"{op}: this simulator was started without profile_dir")
        if op == "start_profile":
            if trace is not None:
                raise EngineError("a profile is being taken already; stop it first")
            self._driver.trace = StepTrace()
            return {"folder": folder}
        if trace is None:
            raise EngineError("no profile is being taken")
        self._driver.trace = None
        return trace.write(Path(folder))

    def _load_adapter(self, name: str, source: str) -> None:
        there = self._adapters.get(name, source)
        if there != source:
            raise EngineError(f"the adapter {name!r} is loaded from {there or 'the start'} already; unload it first")
        self._adapters[name] = source
