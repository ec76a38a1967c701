"""All that a worker has for hand-overs, put together: who can prefill, who can decode, and who meets whom."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from headrace.broker.worker.ports import HandoverSession
from headrace.workers.engine import Engine, EngineInfo, Role
from headrace.workers.handover.coordinator import HandoverCoordinator
from headrace.workers.handover.peer_warmup import PeerWarmup
from headrace.workers.handover.prefill_side import PrefillSide
from headrace.workers.runtime.runtime import Runtime
from headrace.workers.settings import WorkerSettings


def prefilling(
    engine: Engine, info: EngineInfo, runtime: Runtime, *, worker: str, cache: Callable[[], Container[int]] | None
) -> PrefillSide | None:
    """What computes prompts for others; None for an engine that hands nothing over."""
    return PrefillSide(engine, info, runtime.raw, worker=worker, cache=cache) if info.handover else None


class Handovers:
    """Both sides of one worker's hand-overs. `desk` is for the runtime."""

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
        style = engine.capabilities.disagg
        self._cards: Mapping[str, bytes] = {}
        self.desk = HandoverCoordinator(
            session.prefill_client,
            runtime.sequences,
            info,
            settings,
            style=style,
            worker=session.state.worker,
            role=lambda: session.state.member.role,
        )
        self._acquaintances = PeerWarmup(
            session.prefill_client,
            runtime.raw,
            info,
            style=style,
            worker=session.state.worker,
            decodes=lambda: session.state.member.role == Role.DECODE and session.state.taking and session.registered,
        )
        session.members.on_change(self._on_members)

    async def run(self) -> None:
        """Until cancelled."""
        await self._acquaintances.run()

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
        self._acquaintances.changed()
