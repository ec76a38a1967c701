"""Chain values as they travel and are stored: u64, little endian, in an array that the index takes as it is."""

from __future__ import annotations

import sys
from array import array


def u64s(data: bytes | bytearray | memoryview) -> array[int]:
    """Raises ValueError when the length is no multiple of 8."""
    if len(data) % 8:
        raise ValueError(f"{len(data)} bytes are no whole number of 64-bit values")
    values = array("Q")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
