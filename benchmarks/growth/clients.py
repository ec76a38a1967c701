"""Client processes that share the streams of a load, start together and are added up."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

REPLY_S = 60.0
Started = Callable[[], None]


def nothing() -> None:
    """Do nothing at the start."""


class ClientFailed(Exception):
    """A client process ended or said nothing in time."""


class Client:
    """A process that is told lines and says lines of JSON. Every wait for it has a deadline."""

    def __init__(self, *command: str) -> None:
        """`command`: a module of this package, and its arguments."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.growth.{command[0]}", *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def tell(self, line: str) -> None:
        """Send it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def said(self, timeout_s: float) -> dict[str, Any]:
        """Return what it says next. Raises ClientFailed."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise ClientFailed(f"a client said nothing for {timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise ClientFailed(f"a client ended with {self._process.wait(5.0)}")
        return json.loads(line)  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End it."""
        with self._process:
            self._process.kill()


@contextmanager
def running(commands: Iterable[Sequence[str]]) -> Iterator[list[Client]]:
    """Run these for the length of the block."""
    with ExitStack() as stack:
        found = []
        for command in commands:
            found.append(Client(*command))
            stack.callback(found[-1].stop)
        yield found


def shares(streams: int, number: int) -> list[int]:
    """Return how many streams each of so many clients has; those that would have none are left out."""
    each, more = divmod(streams, number)
    return [each + (one < more) for one in range(number) if each or one < more]


def run(
    ready: list[Client], *, streams: int, tokens: int, seconds: float, prepare: int, at_start: Started = nothing
) -> dict[str, Any]:
    """Ask over so many streams for so long. `prepare`: bodies to make before, all clients together. Raises ClientFailed.

    `at_start` is called when all are ready and none has asked.
    """
    used = list(zip(ready, shares(streams, len(ready)), strict=False))
    for client, part in used:
        order = {"streams": part, "tokens": tokens, "seconds": seconds, "prepare": prepare // len(used) + 1}
        client.tell(json.dumps(order))
    for client, _ in used:
        client.said(REPLY_S)
    at_start()
    for client, _ in used:
        client.tell("")
    return summed([client.said(seconds + REPLY_S) for client, _ in used])


def summed(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up what clients counted; of times the median of their percentiles, of the 99th the highest."""
    seconds = max(one["seconds"] for one in found)
    return {
        "seconds": seconds,
        "ok": sum(one["ok"] for one in found),
        "failed": sum(one["failed"] for one in found),
        "req_s": sum(one["ok"] / one["seconds"] for one in found),
        "chunks_s": sum(one["chunks"] / one["seconds"] for one in found),
        "ttft_p50_ms": median(one["ttft_p50_ms"] for one in found),
        "ttft_p99_ms": max(one["ttft_p99_ms"] for one in found),
        "total_p50_ms": median(one["total_p50_ms"] for one in found),
        "clients": len(found),
        "client_cpu_s": sum(one["cpu_s"] for one in found),
        "busiest_client": max(one["cpu_s"] / one["seconds"] for one in found),
        "made_late": any(one["made_late"] for one in found),
        "errors": [error for one in found for error in one["errors"]][:3],
    }
