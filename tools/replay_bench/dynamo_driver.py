"""Driver of NVIDIA Dynamo's selection core: a process of Dynamo's own interpreter, which `dynamo` asks over a pipe.

Each line on standard input is a JSON object. `do` is one of

    begin     scale, credit                           a new core without workers
    worker    id, block_size, blocks, step_tokens     adds a worker, and waits until the core listens to its cache events
    cache     worker, stored, removed                 publishes cache changes as vLLM would: ZMQ, msgpack, numbered
    select    id, tokens, chain                       waits until all cache changes are applied, selects a worker, reserves
    prefilled id, settled id                          the life of the reservation

Only `select` is answered, by a line on standard output: `worker`, `cached` (blocks), `uncached` (tokens), `blocks` (in use with
this request) and `took_s`. A fault is answered by `fault`, and ends the process.

Whether cache changes are applied is known by a block of its own that is stored after them: events of a worker are applied in
their order, so where that block is found, so is all before it. Time that passes here means nothing to the core as it is
started: nothing queues in it, blocks go by events alone, and reservations expire after a year.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

DEADLINE_S = 20  # for a subscription, and for cache changes to be applied
DIGITS = 10  # tokens that spell a u64 in base 128
MARK = 1  # the token behind them in blocks that only mark a place among the events

_pack = msgspec.msgpack.Encoder().encode


def tokens_of(block: int, size: int, mark: int = 0) -> list[int]:
    return [*((block >> 7 * n) & 127 for n in range(DIGITS)), mark, *[0] * (size - DIGITS - 1)]


def signed(value: int) -> int:
    """Return a u64 as the i64 of the same bits."""
    return value - (1 << 64) if value >> 63 else value


def runs(stored: Iterable[int], parents: Mapping[int, int | None]) -> Iterator[tuple[int | None, list[int]]]:
    """Split stored blocks into runs of a chain, each with the block before it, none before the run with its parent."""
    left = dict.fromkeys(stored)
    while left:
        block: int | None = next(iter(left))
        run: list[int] = []
        while block is not None and block in left:
            del left[block]
            run.append(block)
            block = parents.get(block)
        yield block, run[::-1]


class Driver:
    """Drives a selection core. `api` is `dynamo._core`, `folder` a place for sockets."""

    def __init__(self, api: Any, folder: Path) -> None:
        self._api, self._folder = api, folder
        self._zmq = import_module("zmq")  # comes with Dynamo; not everything here is run by its interpreter
        self._context = self._zmq.Context()
        self._core: Any = None
        self._block_size = 0
        self._endpoints = 0
        self._sockets: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}  # worker → number of its next batch of events
        self._marks: dict[int, int] = {}  # worker → the mark that is stored there
        self._mark = 0
        self._changed: dict[int, list[list[Any]]] = {}  # events to be published
        self._parents: dict[int, int | None] = {}
        self._hashes: dict[tuple[int, int], int] = {}  # block and mark → the core's hash of its tokens

    async def do(self, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Do what a line says, and return the answer, if there is one."""
        match message["do"]:
            case "begin":
                self._begin(scale=message["scale"], credit=message["credit"])
            case "worker":
                await self._worker(message)
            case "cache":
                self._cache(message["worker"], message["stored"], message["removed"])
            case "select":
                return await self._select(message)
            case "prefilled":
                await self._core.prefill_complete(message["id"])
            case "settled":
                await self._core.free_reservation(message["id"])
            case other:
                raise ValueError(f"cannot do {other!r}")
        return None

    def _begin(self, *, scale: float, credit: float) -> None:
        if self._core is not None:
            self._core.shutdown()
        for socket in self._sockets.values():
            socket.close()
        for per_worker in (self._sockets, self._numbers, self._marks, self._changed):
            per_worker.clear()
        os.environ["DYN_ROUTER_PREFILL_LOAD_SCALE"] = str(scale)  # those of a single request have no effect in 1.6.1
        os.environ["DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT"] = str(credit)
        self._core = self._api.SelectionService()

    async def _worker(self, message: Mapping[str, Any]) -> None:
        worker, self._block_size = message["id"], message["block_size"]
        socket = self._context.socket(self._zmq.XPUB)  # reads subscriptions
        socket.setsockopt(self._zmq.SNDHWM, 0)  # drops nothing
        socket.setsockopt(self._zmq.LINGER, 0)
        self._endpoints += 1
        endpoint = f"ipc://{self._folder}/{self._endpoints}"
        socket.bind(endpoint)
        self._sockets[worker], self._numbers[worker] = socket, 0
        await self._core.upsert_worker(
            {
                "worker_id": worker,
                "endpoint": f"http://worker-{worker}",
                "block_size": self._block_size,
                "max_num_batched_tokens": message["step_tokens"],
                "total_kv_blocks": message["blocks"],
                "kv_events_endpoints": {0: endpoint},
            }
        )
        if not socket.poll(DEADLINE_S * 1000):
            raise TimeoutError(f"the core does not listen to the events of worker {worker}")
        socket.recv()

    def _cache(self, worker: int, stored: Sequence[int], removed: Sequence[int]) -> None:
        events = self._changed.setdefault(worker, [])
        events += [["BlockRemoved", removed, "GPU"]] if removed else []
        events += [self._stored(run, parent) for parent, run in runs(stored, self._parents)]

    def _stored(self, blocks: Sequence[int], parent: int | None, mark: int = 0) -> list[Any]:
        tokens = [token for block in blocks for token in tokens_of(block, self._block_size, mark)]
        return ["BlockStored", blocks, parent, tokens, self._block_size, None, "GPU"]

    async def _applied(self) -> None:
        """Publish the cache changes, and wait until the core has applied them."""
        changed, self._changed = self._changed, {}
        if not changed:
            return
        self._mark += 1
        for worker, events in changed.items():
            events.append(self._stored([self._mark], None, MARK))
            if worker in self._marks:
                events.append(["BlockRemoved", [self._marks[worker]], "GPU"])
            self._marks[worker] = self._mark
            number = self._numbers[worker].to_bytes(8, "big")
            self._sockets[worker].send_multipart([b"", number, _pack([0.0, events, 0])])
            self._numbers[worker] += 1
        hashes = [self._hash(self._mark, MARK)]
        prompt = {"block_hashes": hashes, "sequence_hashes": [self._mark], "isl_tokens": self._block_size}
        until = time.monotonic() + DEADLINE_S
        while True:
            rows = (await self._core.overlap_scores(prompt))["workers"]
            if changed.keys() <= {row["worker_id"] for row in rows if row["device_blocks"]}:
                return
            if time.monotonic() > until:
                raise TimeoutError(f"cache changes of workers {sorted(changed)} were not applied")

    async def _select(self, message: Mapping[str, Any]) -> dict[str, Any]:
        chain = message["chain"]
        self._parents.update(zip(chain, [None, *chain], strict=False))
        await self._applied()
        request = {
            "selection_id": message["id"],
            "block_hashes": [self._hash(block) for block in chain],
            "sequence_hashes": [signed(block) for block in chain],
            "isl_tokens": message["tokens"],
        }
        began = time.perf_counter()
        selected = await self._core.select_and_reserve(request)
        return {
            "took_s": time.perf_counter() - began,
            "worker": selected["worker_id"],
            "cached": selected["overlap"]["gpu"] // self._block_size,
            "uncached": selected["effective_prefill_tokens"],
            "blocks": selected["potential_decode_blocks"],
        }

    def _hash(self, block: int, mark: int = 0) -> int:
        found = self._hashes.get((block, mark))
        if found is None:
            tokens = tokens_of(block, self._block_size, mark)
            found = signed(self._api.compute_block_hash_for_seq(tokens, self._block_size)[0])
            self._hashes[block, mark] = found
        return found


async def main() -> None:
    """Serve until standard input ends. The argument is a folder for sockets."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever else is printed must not stand between answers
    try:
        driver = Driver(import_module("dynamo._core"), Path(sys.argv[1]))
        for line in sys.stdin.buffer:
            answer = await driver.do(msgspec.json.decode(line))
            if answer is not None:
                answers.write(msgspec.json.encode(answer) + b"\n")
    except Exception as error:  # the asker is told, whatever it is
        answers.write(msgspec.json.encode({"fault": f"{type(error).__name__}: {error}"}) + b"\n")
        raise


if __name__ == "__main__":
    asyncio.run(main())
