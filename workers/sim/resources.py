"""The fabric that an engine opens beside its scheduler. NIXL is imported only by an engine that hands over through it."""

from __future__ import annotations

from collections.abc import Callable

from headrace.workers.sim.settings import SimSettings
from headrace.workers.sim.transfer.fabric import PROCESS_FABRIC, Fabric


def open_fabric(settings: SimSettings, clock: Callable[[], float]) -> Fabric:
    """Return the fabric over which blocks are handed over."""
    if settings.fabric == "local":
        return PROCESS_FABRIC
    from headrace.workers.sim.transfer.nixl_fabric import NixlFabric  # an engine without hand-overs must not load NIXL

    return NixlFabric(settings.blocks, settings.block_bytes, timeout_s=settings.transfer_timeout_s, clock=clock)
