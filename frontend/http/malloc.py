"""Returns the memory of large requests to the system, which the allocator would otherwise keep.

The calls are those of glibc's allocator. Other C libraries do not have them, or do not need them.
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
    """Return large blocks (bodies, texts) as soon as they are free, from now on. By default glibc raises its threshold."""
    if (libc := _libc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE)


def give_back() -> None:
    """Return the memory of many small blocks as well. Takes some milliseconds, in which other threads can run."""
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


def forget_frames(error: BaseException) -> None:
    """Release the frames of an error that was answered, and with them objects such as the request's body.

    An error from a thread or a task is part of a cycle (error, traceback, frame, future, error). It would stay until the
    garbage collector runs, which is seldom here, and a hundred refused bodies of 30 MB would stay with it.
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
