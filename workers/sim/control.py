"""The simulator's control operations (docs/simulator.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.workers.errors import EngineError, UnsupportedByEngine
from headrace.workers.sim.events import EventBuffer
from headrace.workers.sim.fabric_member import FabricMember
from headrace.workers.sim.scheduler import SimScheduler
from headrace.workers.sim.sleep import Sleeper, sleep_args

HANDOVER_OPERATION = "release_handover"  # of engines that hand over
ADAPTER_OPERATIONS = frozenset({"load_adapter", "unload_adapter"})  # of engines that generate
OPERATIONS = ADAPTER_OPERATIONS | {"reset_prefix_cache", "stats", "replay_kv_events", HANDOVER_OPERATION, "sleep", "wake"}


class Operations:
    """The control operations of one started engine. `wake` makes the driver look at the scheduler."""

    def __init__(
        self,
        scheduler: SimScheduler,
        sleeper: Sleeper,
        events: EventBuffer,
        *,
        adapters: dict[str, str],
        member: FabricMember | None,
        wake: Callable[[], None],
    ) -> None:
        """`adapters`: name → where it was loaded from; changed in place."""
        self._scheduler = scheduler
        self._sleeper = sleeper
        self._events = events
        self._adapters = adapters
        self._member = member
        self._wake = wake

    async def do(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run an operation. Raises UnsupportedByEngine for an unknown one, RequestInvalid for wrong arguments."""
        match op:
            case "reset_prefix_cache":
                self._scheduler.manager.clear()
                self._wake()
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
        raise UnsupportedByEngine(f"the simulator has no operation {op!r}")

    def _load_adapter(self, name: str, source: str) -> None:
        there = self._adapters.get(name, source)
        if there != source:
            raise EngineError(f"the adapter {name!r} is loaded from {there or 'the start'} already; unload it first")
        self._adapters[name] = source
