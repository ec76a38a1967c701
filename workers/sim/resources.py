"""The fabric that an engine opens beside its scheduler. NIXL is imported only by an engine that hands over through it."""

from __future__ import annotations

from collections.abc import Callable

from headrace.workers.sim.settings import SimSettings
from headrace.workers.sim.transfer.fabric import PROCESS_FABRIC, Fabric


def open_fabric(settings: SimSettings, clock: Callable[[], float]) -> Fabric:
    """What blocks are handed over by."""
    if settings.fabric == "local":
        return PROCESS_FABRIC
    from headrace.workers.sim.transfer.nixl_fabric import NixlFabric  # who hands nothing over must not pay for it

    return NixlFabric(settings.blocks, settings.block_bytes, timeout_s=settings.transfer_timeout_s, clock=clock)
