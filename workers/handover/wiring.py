"""Wires the parts of a worker's hand-overs: the prefill side, the decode side, and the warm-up of peers."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from headrace.broker.worker.ports import HandoverSession
from headrace.workers.engine import Engine, EngineInfo, Role
from headrace.workers.handover.coordinator import HandoverCoordinator
from headrace.workers.handover.decode_side import HandoverDeps
from headrace.workers.handover.peer_warmup import PeerWarmup
from headrace.workers.handover.prefill_side import PrefillSide
from headrace.workers.handover.prefix_lending import PrefixLender
from headrace.workers.runtime.runtime import Runtime
from headrace.workers.settings import WorkerSettings


def create_prefill_side(
    engine: Engine, info: EngineInfo, runtime: Runtime, *, worker: str, caches: Sequence[Callable[[], Container[int]]]
) -> PrefillSide | None:
    """Create the prefill side, or return None for an engine without hand-overs."""
    return PrefillSide(engine, info, runtime.raw, worker=worker, caches=caches) if info.handover else None


class Handovers:
    """The decode side of a worker's hand-overs. The runtime uses `coordinator`."""

    def __init__(
        self,
        session: HandoverSession,
        engine: Engine,
        info: EngineInfo,
        runtime: Runtime,
        settings: WorkerSettings,
    ) -> None:
        self._session = session
        self._engine = engine
        state = session.state
        self._cards: Mapping[str, bytes] = {}
        deps = HandoverDeps(
            client=session.prefill_client,
            engines=runtime.sequences,
            info=info,
            style=engine.capabilities.disagg,
            worker=state.worker,
        )
        lender = PrefixLender(runtime.raw, info)
        self.coordinator = HandoverCoordinator(deps, settings, role=lambda: state.member.role, lender=lender)
        self._warmup = PeerWarmup(
            deps, runtime.raw, decodes=lambda: state.member.role == Role.DECODE and state.taking and session.registered
        )
        session.members.on_change(self._on_members)

    async def run(self) -> None:
        """Warm up new peers until cancelled."""
        await self._warmup.run()

    def _on_members(self) -> None:
        own = self._session.state.worker
        cards = {
            member.worker: member.transfer_card
            for member in self._session.members.workers(self._session.state.pool).values()
            if member.transfer_card and member.worker != own
        }
        if cards != self._cards:
            self._cards = cards
            self._engine.meet(cards)
        self._warmup.changed()
