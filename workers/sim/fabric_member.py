"""An engine's membership of the fabric: the requests of other engines, and the worker's part in hand-overs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from headrace.workers.engine import Role
from headrace.workers.errors import EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.scheduler import SimScheduler
from headrace.workers.sim.transfer.fabric import Fabric, Notice
from headrace.workers.sim.transfer.handover_state import HandoverWire, parse_offer

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
        """Meet peers, as `Engine.meet` does."""
        self._wire.endpoint.meet(peers)
        self._wake()

    def set_role(self, role: Role) -> None:
        """Change the role, as `Engine.set_role` does. Blocks on offer stay on offer."""
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
