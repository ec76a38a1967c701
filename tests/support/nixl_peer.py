"""Another process with an agent and an arena, driven over a pipe, and how tests talk to it."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import xxhash

from headrace.workers.nixl.agent import Agent
from headrace.workers.nixl.descriptors import Arena
from headrace.workers.nixl.mover import Transfer

PATIENCE_S = 60.0

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed (pip install nixl)")
_context = multiprocessing.get_context("spawn")


def fill(arena: Arena, seed: int) -> None:
    """Every block gets content of its own."""
    noise = np.random.default_rng(seed).integers(0, 256, arena.block_bytes + arena.blocks, dtype=np.uint8)
    for block in range(arena.blocks):
        arena.view(block)[:] = noise[block : block + arena.block_bytes]


def sums(arena: Arena) -> list[int]:
    """A checksum per block."""
    return [xxhash.xxh3_64_intdigest(arena.view(block)) for block in range(arena.blocks)]


def drive(agent: Agent, patience_s: float = PATIENCE_S) -> list[Transfer]:
    """Poll until nothing is active; what ended."""
    ended: list[Transfer] = []
    until_s = time.monotonic() + patience_s
    while agent.active:
        assert time.monotonic() < until_s, "a transfer did not end"
        ended += agent.poll()[0]
        time.sleep(0)
    return ended


def settle(agent: Agent, transfer: Transfer, patience_s: float = PATIENCE_S) -> None:
    """Poll until nothing touches its blocks."""
    until_s = time.monotonic() + patience_s
    while not transfer.settled:
        assert time.monotonic() < until_s, f"{transfer} does not settle"
        agent.poll()
        time.sleep(0.001)


def run(pipe: Connection, blocks: int, block_bytes: int, seed: int) -> None:
    """The process: answers requests of the form (what, arguments…), one answer each."""
    arena = Arena(blocks, block_bytes)
    fill(arena, seed)
    agent = Agent("peer", arena)
    notices: list[tuple[str, bytes, list[int]]] = []
    pipe.send(agent.card)
    while True:
        notices += [(sender, data, sums(arena)) for sender, data in agent.poll()[1]]
        if not pipe.poll(0.001):
            continue
        what, *arguments = pipe.recv()
        if what == "sums":
            pipe.send(sums(arena))
        elif what == "notices":
            pipe.send(notices)
            notices = []
        elif what == "meet":
            pipe.send(agent.meet(*arguments))
        elif what == "notify":
            pipe.send(agent.notify(*arguments))
        elif what in ("read", "write"):
            transfer = getattr(agent, what)(*arguments)
            drive(agent)
            pipe.send((transfer.state, transfer.error))
        elif what == "modules":
            pipe.send(sorted(sys.modules))
        elif what == "leave while reading":  # the process ends with a transfer under way and nothing closed
            pipe.send(repr(agent.read(*arguments)))
            return
        else:
            agent.close()
            return


class PeerProcess:
    """The process as a test sees it. Ends with `stop`."""

    def __init__(self, blocks: int, block_bytes: int, seed: int = 0) -> None:
        self._pipe, far_end = _context.Pipe()
        self.process = _context.Process(target=run, args=(far_end, blocks, block_bytes, seed), daemon=True)
        self.process.start()
        far_end.close()
        self.card: bytes = self._receive()

    def ask(self, *request: Any) -> Any:
        self._pipe.send(request)
        return self._receive()

    def notices(self, count: int) -> list[tuple[str, bytes, list[int]]]:
        """The next notices, with the checksums of all blocks at their arrival."""
        seen: list[tuple[str, bytes, list[int]]] = []
        until_s = time.monotonic() + PATIENCE_S
        while len(seen) < count:
            assert time.monotonic() < until_s, f"{len(seen)} of {count} notices came"
            seen += self.ask("notices")
        return seen

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; after SIGKILL and SIGSTOP, see it work first."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number is signal.SIGKILL:
            self.process.join(PATIENCE_S)
        elif number is signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def stop(self) -> int | None:
        """End it, gently when it can hear; its exit code."""
        if self.process.is_alive():
            try:
                self._pipe.send(("end",))
                self.process.join(PATIENCE_S)
            except (BrokenPipeError, OSError):
                pass
        self.process.kill()
        self.process.join()
        self._pipe.close()
        return self.process.exitcode

    def _receive(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the peer process does not answer"
        return self._pipe.recv()
