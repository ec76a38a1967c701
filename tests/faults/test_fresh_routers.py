"""Workers killed while the routers are fresh, or together with the broker: no hold-down keeps their streams waiting."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from tests.support.sim_streams import client_of, in_threads, wrong_with
from tests.support.up_process import RunningUp

pytestmark = pytest.mark.fault

FLAGS = ("--workers", "3", "--engine-arg", 'timing_overrides={"decode_base_s": 0.02}')
STREAMS = 6
TOKENS = 350  # seven seconds
OUTLAST_A_START = 1200  # on a busy machine a router takes many seconds to be back
LONGEST_S = 2.0  # it was at least 3.3 s from a kill within half a second to the end of the hold-down


class Streams:
    """Streams that run side by side. `came`: when the pieces of each came, on the monotonic clock."""

    def __init__(self, up: RunningUp, tokens: int) -> None:
        self.up = up
        self.tokens = tokens
        self.came: list[list[float]] = [[] for _ in range(STREAMS)]
        self.wrong: list[str] = []

    def read(self, number: int) -> None:
        with client_of(self.up) as api:
            prompt = [*range(300, 340), 1000 + number]
            if wrong := wrong_with(api, prompt, self.tokens, lambda: self.came[number].append(time.monotonic())):
                self.wrong.append(wrong)

    def begun(self) -> bool:
        return all(self.came) or bool(self.wrong)

    def waited_s(self, after_s: float) -> float:
        """How much longer one of them paused than one that was not moved: a busy machine makes all of them wait."""
        longest = sorted(max((b - a for a, b in pairwise(came) if b > after_s), default=0.0) for came in self.came)
        return longest[-1] - longest[STREAMS // 3]


@contextmanager
def streaming(up: RunningUp, tokens: int = TOKENS) -> Iterator[Streams]:
    """All streams have begun; after the block all have ended as they should."""
    streams = Streams(up, tokens)
    with in_threads(streams.read, STREAMS):
        up.until("all streams have begun", streams.begun)
        yield streams
    assert streams.wrong == []


def kill_a_worker(up: RunningUp) -> float:
    os.kill(up.state()["workers"][0]["pid"], signal.SIGKILL)
    return time.monotonic()


def moved_after_restart(up: RunningUp) -> bool:
    return any(event["reason"] == "worker_gone" for event in up.events("job.moved"))


def test_a_worker_that_is_killed_right_after_the_start_is_missed_at_once(start: Callable[..., RunningUp]) -> None:
    up = start(*FLAGS)
    up.until("a router works", lambda: bool(up.events("router.ready")))
    with streaming(up) as streams:
        at_s = kill_a_worker(up)
    assert moved_after_restart(up)
    assert streams.waited_s(at_s) < LONGEST_S


def test_a_worker_that_is_killed_right_after_the_routers_came_back_is_missed_at_once(start: Callable[..., RunningUp]) -> None:
    up = start(*FLAGS)
    up.until("a router works", lambda: bool(up.events("router.ready")))
    time.sleep(4.0)  # no worker is new: only the router is
    with streaming(up, OUTLAST_A_START) as streams:
        os.kill(up.state()["routers"][0]["pid"], signal.SIGKILL)
        up.until("the router is back", lambda: len(up.events("router.ready")) > 1)
        at_s = kill_a_worker(up)
    assert moved_after_restart(up)
    assert streams.waited_s(at_s) < LONGEST_S


def test_a_worker_that_is_killed_together_with_the_broker_is_missed_when_that_is_back(start: Callable[..., RunningUp]) -> None:
    """All leases are forgotten with the broker; the supervisor says of this one that it does not come back."""
    up = start(*FLAGS)
    up.until("a router works", lambda: bool(up.events("router.ready")))
    with streaming(up) as streams:
        os.kill(up.state()["nats"]["pid"], signal.SIGKILL)
        at_s = kill_a_worker(up)
    assert moved_after_restart(up)
    assert streams.waited_s(at_s) < LONGEST_S + 1.0  # the broker is away for the better part of a second


def test_a_worker_that_is_killed_with_the_broker_and_the_only_router_is_missed_when_the_broker_is_back(
    start: Callable[..., RunningUp],
) -> None:
    """Workers move its work while the router starts again: the supervisor has said that the router is not there."""
    up = start(*FLAGS)
    up.until("a router works", lambda: bool(up.events("router.ready")))
    with streaming(up) as streams:
        os.kill(up.state()["nats"]["pid"], signal.SIGKILL)
        os.kill(up.state()["routers"][0]["pid"], signal.SIGKILL)
        at_s = kill_a_worker(up)
    assert moved_after_restart(up)
    assert {event["router"] for event in up.events("lease.revoked") if "router" in event}
    assert streams.waited_s(at_s) < LONGEST_S + 1.0
