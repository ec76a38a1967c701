"""Ends the process of a test that goes on after its time limit.

pytest-timeout raises in the main thread, once. A test that waits again after that, for a file whose close waits for a thread or
for a task that ignores its cancellation, would hold up the whole run. The process then says where each thread stands, and
ends: with pytest-xdist another one goes on with the tests that are left, and this one counts as failed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
from collections.abc import Iterator

import pytest

MORE_S = 60.0  # for what a test cleans up after its time limit

_stderr = pytest.StashKey[int]()
_end_s = pytest.StashKey[float]()


def configure(config: pytest.Config) -> None:
    """Keep the descriptor of stderr, which is replaced while a test runs."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with contextlib.nullcontext() if capture is None else capture.global_and_fixture_disabled():
        config.stash[_stderr] = os.dup(2)


@contextlib.contextmanager
def limited(item: pytest.Item) -> Iterator[None]:
    """End this process where `item` takes `MORE_S` longer than its limit. A limit of 0 is none."""
    limit_s = limit_of(item)
    if not limit_s:
        yield
        return
    item.stash[_end_s] = time.monotonic() + limit_s + MORE_S
    again(item)
    try:
        yield
    finally:
        del item.stash[_end_s]
        faulthandler.cancel_dump_traceback_later()


def again(node: pytest.Item | pytest.Collector) -> None:
    """Set the end of a test once more. pytest calls it off when a test fails, before what that test leaves is cleaned up."""
    end_s = node.stash.get(_end_s, None)
    if end_s is not None:
        left_s = max(1.0, end_s - time.monotonic())
        faulthandler.dump_traceback_later(left_s, exit=True, file=node.config.stash[_stderr])


def limit_of(item: pytest.Item) -> float:
    """Return the seconds of the nearest `timeout` mark, else what the configuration has."""
    mark = item.get_closest_marker("timeout")
    if mark is not None:
        return float(mark.args[0] if mark.args else mark.kwargs["timeout"])
    return float(item.config.getoption("timeout") or item.config.getini("timeout") or 0)
