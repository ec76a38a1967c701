"""The simulator's hand-over beside bare NIXL: the same two processes, the same memory, the same run.

    python -m benchmarks.disagg.sim_transfer [--rounds 15] [--json]

A prefill engine runs in a process of its own, a decode engine in this one, without modelled time.  Per round, in random order:
one hand-over of a whole prompt, timed as the engine that moves the blocks sees it (from asking NIXL to seeing the end: the
decode engine for pull, the prefill engine for push), and the same bytes moved by bare NIXL between the same arenas as one
range, in a tight loop, by the same process.  Printed are medians.  `share`: the median over rounds of the engine's speed by the
bare one; `best_share`: the same of the fastest of all rounds, which other work on the machine disturbs least.  `first_token_ms`
is what the client of the decode engine sees: notices, transfer, checksums, first step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import structlog

from benchmarks.engines.nixl_transfer import Bare
from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, Handover, Output, Role, Sequence
from headrace.workers.nixl.driver import Driver
from headrace.workers.sim.engine import SimEngine
from headrace.workers.sim.nixl_fabric import NixlFabric

TOKENS = 4  # per block
CASES = [(1 << 20, 64), (4 << 20, 32)]  # block bytes, blocks handed over


class Side:
    """An engine, and bare NIXL over its memory."""

    def __init__(self, role: Role, mode: str, block_bytes: int, blocks: int) -> None:
        self.mode = mode
        self.fabric = NixlFabric(2 * blocks, block_bytes, timeout_s=30.0)
        self.engine = SimEngine(fabric=self.fabric)
        self.config = EngineConfig(
            model="sim",
            served_name="sim",
            role=role,
            args={
                "block_size": TOKENS,
                "blocks": 2 * blocks,
                "context_length": 2 * blocks * TOKENS,
                "kv_block_bytes": block_bytes,
                "transfer_mode": mode,
            },
        )
        self.bare: Bare | None = None
        self.lender: Driver | None = None
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()

    async def start(self) -> tuple[bytes, bytes, int]:
        """Return the engine's card, bare metadata of its memory, and where that begins."""
        info = await self.engine.start(self.config, self._sink)
        assert self.fabric.arena is not None
        self.lender = Driver("bare-lender")
        self.lender.register(self.fabric.arena.address, self.fabric.arena.size)
        return info.transfer_card, self.lender.metadata(), self.fabric.arena.address

    def _sink(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._outputs.put_nowait(output)

    def meet(self, card: bytes, metadata: bytes) -> None:
        assert self.fabric.arena is not None
        self.engine.meet({"peer": card})
        self.bare = Bare(self.fabric.arena, metadata, time.perf_counter)

    async def run(self, name: str, tokens: list[int], handover: Handover) -> Output:
        """Return the first output of a sequence of one token."""
        await self.engine.submit(
            Sequence(id=name, token_ids=tokens, prompt_tokens=len(tokens), sampling=Sampling(max_tokens=1), handover=handover)
        )
        return await self._outputs.get()

    async def moved_s(self) -> float:
        """Seconds of all transfers so far that this side carried out."""
        stats = await self.engine.control("stats", {})
        return float(stats["fetch_s" if self.mode == "pull" else "write_s"])

    async def forget(self) -> None:
        await self.engine.control("reset_prefix_cache", {})

    async def bare_s(self, far: int, size: int) -> float:
        assert self.bare is not None
        assert self.fabric.arena is not None
        op = "read" if self.mode == "pull" else "write"
        return self.bare.move(op, [(self.fabric.arena.address, size, 0)], [(far, size, 0)])


def host(pipe: Connection, *args: Any) -> None:
    """Run the prefill engine, in the other process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    asyncio.run(_host(pipe, Side(Role.PREFILL, *args)))


async def _host(pipe: Connection, side: Side) -> None:
    while True:
        while not pipe.poll():
            await asyncio.sleep(0.001)
        name, *args = pipe.recv()
        if name == "end":
            break
        result = getattr(side, name)(*args)
        pipe.send(await result if asyncio.iscoroutine(result) else result)
    await side.engine.stop(1.0)


async def measure(mode: str, block_bytes: int, blocks: int, rounds: int, rng: random.Random) -> dict[str, Any]:
    """Measure one case."""
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    process = context.Process(target=host, args=(far_end, mode, block_bytes, blocks), daemon=True)
    process.start()

    async def call(*args: Any) -> Any:
        pipe.send(args)
        while not pipe.poll():
            if not process.is_alive():
                raise RuntimeError(f"the other process ended at {args[0]!r}")
            await asyncio.sleep(0.001)
        return pipe.recv()

    here = Side(Role.DECODE, mode, block_bytes, blocks)
    there_card, there_bare, there_at = await call("start")
    card, metadata, here_at = await here.start()
    await call("meet", card, metadata)
    here.meet(there_card, there_bare)
    size = block_bytes * blocks
    times: dict[str, list[float]] = {"bare": [], "engine": []}
    first_token: list[float] = []

    async def engine(number: int) -> float:
        tokens = [number + 1] * (blocks * TOKENS)
        given = await call("run", str(number), tokens, Handover(kind="prefill"))
        before = await here.moved_s() if mode == "pull" else await call("moved_s")
        began = time.perf_counter()
        last = await here.run(str(number), tokens, Handover(kind="decode", params=given.handover))
        first_token.append(time.perf_counter() - began)
        assert last.fault is None, last.fault
        await asyncio.sleep(0.01)  # the other side sees its end
        after = await here.moved_s() if mode == "pull" else await call("moved_s")
        await here.forget()  # so that all rounds, and bare NIXL, use the same blocks
        await call("forget")
        return after - before

    async def bare(number: int) -> float:
        return await here.bare_s(there_at, size) if mode == "pull" else await call("bare_s", here_at, size)

    for number in range(rounds + 1):
        for way in rng.sample([engine, bare], 2):
            times[way.__name__].append(await way(number))
    for values in (*times.values(), first_token):
        del values[0]  # connections are made in it
    pipe.send(("end",))
    await here.engine.stop(1.0)
    await asyncio.to_thread(process.join, 10)
    speeds = {f"{way}_gb_s": round(size / statistics.median(taken) / 1e9, 2) for way, taken in times.items()}
    share = statistics.median(b / e for b, e in zip(times["bare"], times["engine"], strict=True))
    return (
        {"mode": mode, "mib": block_bytes >> 20, "blocks": blocks}
        | speeds
        | {
            "share": round(share, 3),
            "best_share": round(min(times["bare"]) / min(times["engine"]), 3),
            "first_token_ms": round(statistics.median(first_token) * 1e3, 1),
        }
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    rng = random.Random(args.seed)
    rows = [asyncio.run(measure(mode, *case, args.rounds, rng)) for mode in ("pull", "push") for case in CASES]
    if args.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
