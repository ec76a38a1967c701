"""The simulator's control operations (docs/simulator.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import structlog

from headrace.workers.engine import Output, Role
from headrace.workers.errors import EngineError, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.fabric import Fabric, HandoverWire, Notice, parse_offer
from headrace.workers.sim.scheduler import SimScheduler
from headrace.workers.sim.step_driver import EventBuffer, StepDriver, StepTrace

# The sleep mode of an engine: it frees its memory, or only pretends to, and refuses sequences meanwhile.
#
# Level 1 is for pauses, level 2 for changing the weights. The content of the cache after waking:
#
#     memory freed?   level 1                         level 2
#     yes             the tiers below the device      nothing
#     no              everything                      nothing

LEVELS = (1, 2)
_POLL_S = 0.005


class SleepArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of `sleep`. `mode`: "abort" the sequences inside, or "wait" for them to end, `timeout_s` at most."""

    level: Literal[1, 2] = 1
    mode: Literal["abort", "wait"] = "abort"
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 30.0


class Sleeper:
    def __init__(self, scheduler: SimScheduler, driver: StepDriver) -> None:
        self._scheduler = scheduler
        self._driver = driver
        self._call = 0  # a later call supersedes a waiting one
        self.level = 0

    async def sleep(self, args: SleepArgs) -> dict[str, int | bool]:
        """Refuse sequences from now on, and sleep once those inside have ended or been aborted, with finish "abort"."""
        scheduler = self._scheduler
        self._call += 1
        call = self._call
        scheduler.closed = f"the engine sleeps (level {max(self.level, args.level)})"
        if args.mode == "wait":
            await self._until_idle(args.timeout_s, call)
            if call != self._call:  # woken, or sent to sleep otherwise, meanwhile
                return {"level": self.level, "aborted": 0, "memory_freed": scheduler.memory_freed}
        ids = scheduler.ids
        self._driver.abort(ids)
        if scheduler.exchange.prefill_side is not None:
            scheduler.exchange.prefill_side.release_all()
        if ids:
            self._driver.emit([Output(name, [], finish="abort") for name in ids])
        self.level = max(self.level, args.level)
        scheduler.memory_freed = scheduler.settings.sleep_frees_memory
        if self.level == max(LEVELS):
            scheduler.manager.clear()
        elif scheduler.memory_freed:
            scheduler.manager.clear_device()
        self._driver.wake()
        return {"level": self.level, "aborted": len(ids), "memory_freed": scheduler.memory_freed}

    async def _until_idle(self, timeout_s: float, call: int) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self._driver.idle and call == self._call and loop.time() < deadline:
            await asyncio.sleep(_POLL_S)

    def wake(self) -> None:
        """Accept sequences again. Has no effect on an engine that is awake."""
        self._call += 1
        self.level = 0
        self._scheduler.closed = ""
        self._scheduler.memory_freed = False
        self._driver.wake()


def sleep_args(given: object) -> SleepArgs:
    """Read the arguments of `sleep`. Raises RequestInvalid."""
    try:
        return msgspec.convert(given, SleepArgs)
    except msgspec.ValidationError as error:
        raise RequestInvalid(f"sleep: {error}") from None


ROLES = frozenset({Role.AGGREGATED, Role.PREFILL, Role.DECODE})
"""Those of an engine that can hand over."""

_log = structlog.get_logger()


class FabricMember:
    """Joins the fabric under this id when constructed. Raises EngineStartFailed when it cannot.

    `wake` makes the engine look for changes.
    """

    def __init__(
        self, wire: HandoverWire, scheduler: SimScheduler, fabric: Fabric, engine: str, *, wake: Callable[[], None]
    ) -> None:
        self._wire = wire
        self._scheduler = scheduler
        self._wake = wake
        try:
            wire.endpoint = fabric.join(engine, self)
        except ValueError as error:
            raise EngineStartFailed(f"engine_id: {error}") from None
        wire.manager.on_reuse = wire.endpoint.overwritten

    @property
    def engine(self) -> str:
        return self._wire.engine

    @property
    def card(self) -> bytes:
        return self._wire.endpoint.card

    @property
    def lends(self) -> bool:
        return self._wire.lends

    @property
    def terms(self) -> str:
        return self._wire.terms

    def leave(self) -> None:
        self._wire.endpoint.leave()

    # -- for other engines -----------------------------------------------------------------------------------

    def read(self, blocks: Sequence[int]) -> list[int] | None:
        if self._scheduler.memory_freed:
            return None
        return [self._wire.manager.cell(block) for block in blocks]

    def write(self, blocks: Sequence[int], cells: Sequence[int]) -> bool:
        if self._scheduler.memory_freed:
            return False
        for block, cell in zip(blocks, cells, strict=True):
            self._wire.manager.set_cell(block, cell)
        return True

    def notice(self, notice: Notice) -> None:
        for side in (self._scheduler.exchange.prefill_side, self._scheduler.exchange.decode_side):
            if side is not None:
                side.notice(notice)
        self._wake()

    # -- for the worker --------------------------------------------------------------------------------------

    def meet(self, peers: Mapping[str, bytes]) -> None:
        self._wire.endpoint.meet(peers)
        self._wake()

    def set_role(self, role: Role) -> None:
        if role not in ROLES:
            raise UnsupportedByEngine(f"the simulator has no role {role.value!r}")
        if self._scheduler.ids:
            raise UnsupportedByEngine(
                f"{len(self._scheduler.ids)} sequences are inside: the role stays {self._wire.role.value}"
            )
        self._wire.role = role

    def release_sequence(self, sequence_id: str, params: Mapping[str, Any] | None) -> None:
        """Release offered blocks, as `Engine.release` does."""
        if params is None:
            self._scheduler.release(sequence_id, "nobody fetches the blocks")
            self._wake()
            return
        try:
            self.release({"params": params})
        except RequestInvalid as error:  # another engine's offer, which cannot be declined from here
            _log.warning("handover.not_released", engine=self.engine, sequence=sequence_id, reason=str(error))

    def release(self, args: Mapping[str, Any]) -> bool:
        """Release the hand-over with these `params`, of this engine or another one, or of this `request` of this engine.

        Returns true when there was one, or when the other engine could be told.  Raises RequestInvalid.
        """
        self._wake()
        if "request" in args:
            if not isinstance(args["request"], str):
                raise RequestInvalid("release_handover needs params or a request id", param="handover")
            return self._scheduler.release(args["request"], "the hand-over was released")
        offer = parse_offer(args.get("params"))
        if offer.engine == self.engine:
            return self._scheduler.release(offer.request, "the hand-over was released")
        decode_side = self._scheduler.exchange.decode_side
        return decode_side is not None and decode_side.decline(offer)


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
