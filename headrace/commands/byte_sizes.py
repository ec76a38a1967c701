"""Formats bytes for people."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def size(count: int) -> str:
    """Return a number of bytes with a binary unit: `512 B`, `1.5 MiB`; a negative one is `no limit`."""
    if count < 0:
        return "no limit"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
