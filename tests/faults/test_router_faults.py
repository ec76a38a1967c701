"""Routers killed, frozen and stopped under real clients: nothing fails, and every text is exact."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.sim_streams import client_of, in_threads, wrong_with
from tests.support.up_process import RunningUp

pytestmark = pytest.mark.fault

SLOW = ("--engine-arg", 'timing_overrides={"decode_base_s": 0.005}')
CLIENTS = 6


class Load:
    """Clients that ask one request after the other."""

    def __init__(self, up: RunningUp) -> None:
        self.up = up
        self.stop = threading.Event()
        self.failures: list[str] = []
        self.answered = 0

    def ask(self, number: int) -> None:
        n = 0
        with client_of(self.up) as api:
            while not self.stop.is_set() and not self.failures:
                n += 1
                if wrong := wrong_with(api, [*range(300, 340), 1000 + number, 2000 + n], 20):
                    self.failures.append(wrong)
                self.answered += 1


@contextmanager
def load_on(up: RunningUp) -> Iterator[Load]:
    load = Load(up)
    with in_threads(load.ask, CLIENTS, stop=load.stop.set):
        yield load
    assert load.failures == []


def goes_on(up: RunningUp, load: Load, more: int = 4 * CLIENTS) -> None:
    before = load.answered
    up.until("requests are answered", lambda: bool(load.failures) or load.answered >= before + more)
    assert load.failures == []


def routers_ready(up: RunningUp, n: int) -> None:
    up.until(f"{n} routers work", lambda: len(up.events("router.ready")) >= n)


def pid_of(up: RunningUp, number: int = 0) -> int:
    pid: int = up.state()["routers"][number]["pid"]
    return pid


def test_a_killed_router_is_missed_by_nobody_and_comes_back(start: Callable[..., RunningUp]) -> None:
    up = start("--workers", "2", *SLOW)
    routers_ready(up, 1)
    with load_on(up) as load:
        goes_on(up, load)
        os.kill(pid_of(up), signal.SIGKILL)
        goes_on(up, load)
        routers_ready(up, 2)
        goes_on(up, load)


def test_a_frozen_router_costs_seconds_and_no_request(start: Callable[..., RunningUp]) -> None:
    up = start("--workers", "2", *SLOW)
    routers_ready(up, 1)
    with load_on(up) as load:
        goes_on(up, load)
        pid = pid_of(up)
        os.kill(pid, signal.SIGSTOP)
        try:
            goes_on(up, load)
        finally:
            os.kill(pid, signal.SIGCONT)
        up.until("it notices and holds its lease again", lambda: bool(up.events("router.fenced")))
        goes_on(up, load)


def test_one_of_two_routers_may_die_and_another_may_be_stopped(start: Callable[..., RunningUp]) -> None:
    up = start("--workers", "2", "--routers", "2", *SLOW)
    routers_ready(up, 2)
    with load_on(up) as load:
        goes_on(up, load)
        os.kill(pid_of(up, 0), signal.SIGKILL)
        goes_on(up, load)
        os.kill(pid_of(up, 1), signal.SIGTERM)
        up.until("it has left", lambda: [e["part"] for e in up.events("part.left")] == ["router-2"])
        goes_on(up, load)
    assert [event["reason"] for event in up.events("part.left")] == ["drained"]
    assert up.events("router.stopped")


def test_a_dead_worker_s_streams_go_on_through_the_router(start: Callable[..., RunningUp]) -> None:
    up = start("--workers", "2", *SLOW)
    routers_ready(up, 1)
    with load_on(up) as load:
        goes_on(up, load)
        os.kill(up.state()["workers"][0]["pid"], signal.SIGKILL)
        goes_on(up, load, more=2 * CLIENTS)
