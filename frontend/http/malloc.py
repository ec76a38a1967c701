"""Memory that a large request needed goes back to the system: the allocator would keep it for the next one.

This is about glibc's allocator. Other C libraries have nothing like these calls, or need nothing like them.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_LARGE = 1 << 20  # bytes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h


@functools.cache
def _libc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        libc.malloc_trim.argtypes, libc.malloc_trim.restype = [ctypes.c_size_t], ctypes.c_int
        libc.mallopt.argtypes, libc.mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    except (OSError, AttributeError):
        return None
    return libc


def return_large() -> None:
    """From now on large blocks (bodies, texts) go back as soon as they are free; by itself the allocator gets used to them."""
    if (libc := _libc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE)


def give_back() -> None:
    """What many small blocks took, too. Takes some milliseconds and lets other threads run meanwhile."""
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


def forget_frames(error: BaseException) -> None:
    """For an error that was answered: what its frames hold, such as the request's body, is free at once.

    An error that came out of a thread or a task is part of a cycle (error, traceback, frame, future, error), so it would stay
    until the garbage collector comes by, which is seldom here, and a hundred refused bodies of 30 MB would stay with it.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        left += [one.__context__, one.__cause__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
