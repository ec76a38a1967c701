"""Tells orchestrators how a worker stands: its lease, its engine, its role, and what it holds."""

from __future__ import annotations

from typing import Any

from headrace.broker.models.cards import ModelCard
from headrace.broker.part_state import PartState, Standing
from headrace.broker.worker.session import WorkerSession
from headrace.workers import metrics
from headrace.workers.engine import Engine, EngineInfo, Load
from headrace.workers.runtime.runtime import Runtime

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
        """Publish until cancelled."""
        await self._state.keep(self.describe)

    def describe(self) -> Standing:
        """Describe the worker now. Ready: it takes work. Healthy: it does, or does not by an operator's will."""
        state, dead = self._session.state, self._runtime.dead
        if dead.done():
            why = f"the engine is dead: {dead.result()}"
        elif not self._session.registered:
            why = "it holds no lease"
        elif state.draining:
            why = "draining"
        else:
            why = _WHY.get(state.withdrawn, "")
        willed = not dead.done() and bool(state.draining or state.withdrawn)
        return Standing(ready=not why, healthy=not why or willed, why=why, facts=self._facts())

    def _facts(self) -> dict[str, Any]:
        session, member, load = self._session, self._session.state.member, self._engine.load()
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
            "lease_held": session.registered,
            "runs": len(session.state.runs),
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
