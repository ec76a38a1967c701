"""Measures our transfers beside bare NIXL: the same memory, the same two processes, the same run.

    python -m benchmarks.engines.nixl_transfer [--mib 64] [--rounds 15] [--blocks 64,256,1024,4096] [--cpu] [--json]

Per case and round, in random order: bare NIXL moving one range of all bytes, bare NIXL moving the same ranges as we do, and
ours (`headrace.workers.nixl.agent.Agent`, polled from an event loop as its docstring says).  Bare NIXL is a plain
`initialize_xfer` through its bindings with a tight loop around the status.  It has our progress settings: with those of NIXL's
Python class two progress threads would keep two cores busy and slow every process down.  Printed are medians; `share` is our
speed by that of bare NIXL with one range, `alike` by that of bare NIXL with the same ranges.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import structlog

from headrace.workers.nixl.agent import Agent
from headrace.workers.nixl.descriptors import Arena
from headrace.workers.nixl.driver import Driver, bindings

Ranges = list[tuple[int, int, int]]
Clock = Callable[[], float]


def lend(pipe: Connection, blocks: int, block_bytes: int) -> None:
    """Run the other process, whose memory is read and written."""
    arena = Arena(blocks, block_bytes)
    agent, bare = Agent("lender", arena), Driver("bare-lender")
    bare.register(arena.address, arena.size)
    pipe.send((agent.card, bare.metadata(), arena.address))
    while not pipe.poll(0.002):
        agent.poll()
        bare.notices()
    agent.close()


@contextmanager
def lender(blocks: int, block_bytes: int) -> Iterator[tuple[bytes, bytes, int]]:
    """Run the other process; yields its card, its bare metadata and the address of its arena."""
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    process = context.Process(target=lend, args=(far_end, blocks, block_bytes))
    process.start()
    far_end.close()  # so that its death ends our waiting
    try:
        yield pipe.recv()
        pipe.send(None)
        process.join(10)
    finally:
        process.kill()


class Bare:
    """NIXL without us."""

    def __init__(self, arena: Arena, metadata: bytes, clock: Clock) -> None:
        self.clock = clock
        self.nixl = bindings()
        self.driver = Driver("bare")
        self.driver.register(arena.address, arena.size)
        self.driver.add(metadata)
        self.agent = self.driver._agent

    def move(self, op: str, local: Ranges, remote: Ranges) -> float:
        """Seconds for these ranges."""
        nixl, agent = self.nixl, self.agent
        kind = nixl.NIXL_READ if op == "read" else nixl.NIXL_WRITE
        began_s = self.clock()
        ours, theirs = nixl.nixlXferDList(nixl.DRAM_SEG, local), nixl.nixlXferDList(nixl.DRAM_SEG, remote)
        handle = agent.createXferReq(kind, ours, theirs, "bare-lender", b"", [])
        status = agent.postXferReq(handle, b"")
        while status == nixl.NIXL_IN_PROG:
            status = agent.getXferStatus(handle)
        took_s = self.clock() - began_s
        assert status == nixl.NIXL_SUCCESS, status
        agent.releaseXferReq(handle)
        return took_s


async def move(agent: Agent, peer: str, op: str, local: list[int], remote: list[int], clock: Clock) -> float:
    """Seconds for these blocks by ours, from the request to its reported end."""
    began_s = clock()
    transfer = agent.read(peer, remote, local) if op == "read" else agent.write(peer, local, remote)
    while agent.active:
        agent.poll()
        await asyncio.sleep(0)
    assert transfer.state == "done", transfer
    return clock() - began_s


def measure(block_bytes: int, args: argparse.Namespace, rng: random.Random) -> list[dict[str, Any]]:
    """Measure all cases with one block size."""
    clock: Clock = time.thread_time if args.cpu else time.perf_counter
    count = (args.mib << 20) // block_bytes
    rows = []
    with lender(2 * count, block_bytes) as (card, metadata, far), asyncio.Runner() as loop:
        arena = Arena(2 * count, block_bytes)
        agent, bare = Agent("borrower", arena), Bare(arena, metadata, clock)
        peer = agent.meet(card)
        whole = [(arena.address, count * block_bytes, 0)], [(far, count * block_bytes, 0)]
        for op in ("read", "write"):
            for order in ("contiguous", "random"):
                times: dict[str, list[float]] = {"bare": [], "bare_alike": [], "ours": []}
                for _ in range(args.rounds):
                    local, remote, alike = list(range(count)), list(range(count)), whole
                    if order == "random":
                        local, remote = rng.sample(range(2 * count), count), rng.sample(range(2 * count), count)
                        alike = ranges(local, arena.address, block_bytes), ranges(remote, far, block_bytes)
                    for way in rng.sample(list(times), 3):
                        if way == "ours":
                            took_s = loop.run(move(agent, peer, op, local, remote, clock))
                        else:
                            took_s = bare.move(op, *(whole if way == "bare" else alike))
                        times[way].append(took_s)
                rows.append(row({"op": op, "order": order, "kib": block_bytes >> 10, "blocks": count}, times))
        agent.close()
    return rows


def ranges(blocks: list[int], address: int, size: int) -> Ranges:
    """Blocks as plain ranges."""
    return [(address + block * size, size, 0) for block in blocks]


def row(case: dict[str, Any], times: dict[str, list[float]]) -> dict[str, Any]:
    """Speeds in GB/s and what part of bare NIXL's speed ours is."""
    size = case["blocks"] * case["kib"] << 10
    speeds = {way: round(size / statistics.median(took) / 1e9, 2) for way, took in times.items()}
    shares = {
        name: round(statistics.median(bare / ours for bare, ours in zip(times[way], times["ours"], strict=True)), 3)
        for name, way in (("share", "bare"), ("alike", "bare_alike"))
    }
    return case | speeds | shares


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="of one transfer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", default="64,256,1024,4096", help="sizes of blocks in KiB")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU time of the thread that asks, for a machine that is busy otherwise"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    rng = random.Random(args.seed)
    rows = [row for kib in args.blocks.split(",") for row in measure(int(kib) << 10, args, rng)]
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'op':6}{'order':12}{'block':>9}{'blocks':>8}{'bare':>8}{'alike':>8}{'ours':>8}   GB/s{'share':>10}{'alike':>8}")
    for seen in rows:
        speeds = "".join(f"{seen[way]:8.2f}" for way in ("bare", "bare_alike", "ours"))
        size = f"{seen['kib']} KiB"
        shares = f"{seen['share']:10.0%}{seen['alike']:8.0%}"
        print(f"{seen['op']:6}{seen['order']:12}{size:>9}{seen['blocks']:8}{speeds}       {shares}")


if __name__ == "__main__":
    main()
