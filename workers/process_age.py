"""Tells how long ago this process was started."""

from __future__ import annotations

import os
import time
from pathlib import Path

_START_TIME = 19  # in clock ticks since the boot: field 22 of proc(5), counted from the one behind the name


def process_age_s(stat: Path = Path("/proc/self/stat")) -> float:
    """Return the age of this process in seconds, the imports included; 0.0 where the kernel does not tell."""
    try:
        fields = stat.read_text().rpartition(")")[2].split()
        ticks = int(fields[_START_TIME])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
    return max(age_s, 0.0)
