"""Measures the memory that a worker and its engine's processes use, on the host and on the devices.

A sleep reports what it has freed as the difference of two measurements, not as what the engine meant to free.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.workers.health.process_guard import descendants


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory in bytes. `device` is that of all devices together, other processes included; None = no device can be read."""

    host: int
    device: int | None = None

    def freed_until(self, later: MemoryUse) -> dict[str, int]:
        """Return the bytes that have been freed from this measurement to a later one, below 0 for a growth."""
        freed = {"host_bytes_freed": self.host - later.host}
        if self.device is not None and later.device is not None:
            freed["device_bytes_freed"] = self.device - later.device
        return freed

    def report(self) -> dict[str, int]:
        """Return the measurement as operators see it."""
        return {"host_bytes": self.host, **({"device_bytes": self.device} if self.device is not None else {})}


def measure() -> MemoryUse:
    """Measure this process with all its descendants. Blocks for some milliseconds."""
    pids = [os.getpid(), *(pid for pid, _ in descendants(os.getpid()))]
    return MemoryUse(sum(map(_host_bytes, pids)), _device_bytes())


def _host_bytes(pid: int) -> int:
    """Return a process's share of the memory that it maps: pages of several processes count once among them."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) << 10
    return 0  # it has ended, or this system has no such file


def _device_bytes() -> int | None:
    try:
        import pynvml
    except ImportError:
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return sum(int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
