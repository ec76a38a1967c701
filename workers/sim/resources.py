"""What an engine opens beside its scheduler: its fabric and its disk, each loaded only by who needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.workers.sim.settings import SimSettings
from headrace.workers.sim.transfer.fabric import PROCESS_FABRIC, Fabric

if TYPE_CHECKING:
    from headrace.workers.sim.transfer.disk_store import DiskStore


def open_fabric(settings: SimSettings, clock: Callable[[], float]) -> Fabric:
    """What blocks are handed over by."""
    if settings.fabric == "local":
        return PROCESS_FABRIC
    from headrace.workers.sim.transfer.nixl_fabric import NixlFabric  # who hands nothing over must not pay for it

    return NixlFabric(settings.blocks, settings.block_bytes, timeout_s=settings.transfer_timeout_s, clock=clock)


def open_disk(settings: SimSettings, clock: Callable[[], float]) -> DiskStore | None:
    """The bytes of the disk tier; None where it has none. Raises EngineStartFailed, NixlUnavailable."""
    if settings.disk_path is None:
        return None
    from headrace.workers.sim.transfer.disk_store import DiskStore  # nor who keeps nothing on disk

    return DiskStore(
        Path(settings.disk_path),
        blocks=settings.disk_blocks,
        block_bytes=settings.block_bytes,
        timeout_s=settings.transfer_timeout_s,
        clock=clock,
    )
