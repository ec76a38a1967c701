"""An engine's seat on the fabric: what the other engines can do to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workers.errors import EngineStartFailed, RequestInvalid
from workers.sim.fabric import Notice
from workers.sim.scheduler import Scheduler
from workers.sim.wire import Wire, parse_offer


class FabricMember:
    """Joins when made, raising EngineStartFailed when the engine's id is taken. `wake` has the engine look what has changed."""

    def __init__(self, wire: Wire, scheduler: Scheduler, *, wake: Callable[[], None]) -> None:
        self._wire = wire
        self._scheduler = scheduler
        self._wake = wake
        try:
            wire.fabric.join(wire.engine, self)
        except ValueError as error:
            raise EngineStartFailed(f"engine_id: {error}") from None

    @property
    def engine(self) -> str:
        return self._wire.engine

    def leave(self) -> None:
        self._wire.fabric.leave(self._wire.engine)

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
        for side in (self._scheduler.exchange.giver, self._scheduler.exchange.taker):
            if side is not None:
                side.notice(notice)
        self._wake()

    def release(self, args: Mapping[str, Any]) -> bool:
        """Let go of the hand-over with these `params`, on either side, or of this `request` of a prefill engine.

        Whether there was one, or, on the decode side, whether the other could be told.  Raises RequestInvalid.
        """
        giver, taker = self._scheduler.exchange.giver, self._scheduler.exchange.taker
        self._wake()
        if taker is not None:
            return taker.decline(parse_offer(args.get("params")))
        request = args["request"] if "request" in args else parse_offer(args.get("params")).request
        if not isinstance(request, str):
            raise RequestInvalid("release_handover needs params or a request id", param="handover")
        return giver is not None and giver.release(request, "the hand-over was released")
