"""The time to the first token of a prompt whose prefix lies in a KV tier, against that of computing it, with a real vLLM.

    .venv/bin/python -m benchmarks.engines.kv_tiers --model FOLDER --engine-arg dtype=float32

An engine per tier, one after the other, and a nats-server for the object store. Each round takes a new prompt of each length
and asks for its first token twice: when it has to be computed, and when its blocks are in the tier alone, after other prompts
have filled the device, or device and host were emptied.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.broker.messages import Sampling
from headrace.jetstream.client import Connection
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.workers.broker_access import BrokerAccess
from headrace.workers.engine import EngineConfig, EngineInfo, Output, Sequence
from headrace.workers.vllm.engine import VllmEngine

SETTLE_S = {"host": 1.0, "disk": 2.0, "store": 6.0}  # until blocks are there
FIRST = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)


class Asker:
    """Asks one engine, one prompt at a time."""

    def __init__(self) -> None:
        self.engine = VllmEngine()
        self._number = 0
        self._ended = asyncio.Event()
        self._last: Output | None = None

    def sink(self, outputs: list[Output]) -> None:
        """Take the outputs of a step."""
        for output in outputs:
            if output.finish or output.fault:
                self._last = output
                self._ended.set()

    async def first_token(self, prompt: list[int]) -> tuple[float, int, list[int]]:
        """Return seconds to the first token, cached tokens, and that token. Raises SystemExit if the request fails."""
        self._number += 1
        self._ended.clear()
        start = time.perf_counter()
        sequence = Sequence(id=f"b{self._number}-1-0", token_ids=prompt, prompt_tokens=len(prompt), sampling=FIRST)
        await self.engine.submit(sequence)
        await self._ended.wait()
        took_s = time.perf_counter() - start
        assert self._last is not None
        if self._last.fault is not None:
            raise SystemExit(f"a request failed: {self._last.fault}")
        return took_s, self._last.cached_tokens or 0, list(self._last.ids)


def new_prompt(seed: int, length: int) -> list[int]:
    """Return the ids of some prompt of its own."""
    return [(seed * 7919 + n * 31) % 40_000 + 100 for n in range(length)]


async def evicted(asker: Asker, tier: str, seed: int, info: EngineInfo, longest: int) -> None:
    """Leave the blocks in the tier alone: other prompts fill the device, or device and host are emptied."""
    await asyncio.sleep(SETTLE_S[tier])
    if tier != "host":
        await asker.engine.control("reset_prefix_cache", {})
        return
    for number in range(-(-info.blocks * info.block_size // longest)):
        await asker.first_token(new_prompt(seed * 10 + number, longest))


@dataclass(slots=True)
class Times:
    """Times of the prompts of one length."""

    computed_s: list[float] = field(default_factory=list)
    found_s: list[float] = field(default_factory=list)
    equal: int = 0

    def report(self, tier: str, tokens: int) -> dict[str, Any]:
        return {
            "tier": tier,
            "tokens": tokens,
            "rounds": len(self.computed_s),
            "computed_ms": [round(statistics.median(self.computed_s) * 1000), *_range(self.computed_s)],
            "found_ms": [round(statistics.median(self.found_s) * 1000), *_range(self.found_s)],
            "first_tokens_equal": self.equal,
        }


async def measure(
    tier: str, args: Mapping[str, Any], options: argparse.Namespace, access: BrokerAccess
) -> list[dict[str, Any]]:
    """Run one engine with this tier."""
    asker = Asker()
    config = EngineConfig(model=options.model, served_name="b", args=args, broker=access)
    info = await asker.engine.start(config, asker.sink)
    longest = max(options.tokens)
    times = {length: Times() for length in options.tokens}
    try:
        await asker.first_token(new_prompt(1, longest))  # what is done once
        for number in range(options.rounds):
            asked = {length: new_prompt(1000 + number * 100 + place, length) for place, length in enumerate(times)}
            tokens = {}
            for length, prompt in asked.items():
                took_s, cached, tokens[length] = await asker.first_token(prompt)
                if cached:
                    raise SystemExit("a new prompt was cached")
                times[length].computed_s.append(took_s)
            await evicted(asker, tier, 5000 + number, info, longest)
            for length, prompt in asked.items():
                took_s, cached, token = await asker.first_token(prompt)
                if cached < length - info.block_size:
                    raise SystemExit(f"only {cached} of {length} tokens were found in tier {tier}")
                times[length].found_s.append(took_s)
                times[length].equal += token == tokens[length]
        return [of.report(tier, length) for length, of in times.items()]
    finally:
        await asker.engine.stop(5.0)


def _range(times_s: list[float]) -> list[int]:
    return [round(min(times_s) * 1000), round(max(times_s) * 1000)]


async def main(options: argparse.Namespace, folder: Path, server: EmbeddedServer) -> None:
    """Print a line of JSON per tier and length."""
    access = BrokerAccess(ConnectOptions(servers=(server.url,)), Subjects("bench"), "p")
    async with await Connection.connect(access.options, subjects=access.subjects) as connection:
        await ensure_topology(connection, Topology(access.subjects))
    given = dict(arg.split("=", 1) for arg in options.engine_arg)
    args = {name: _value(text) for name, text in given.items()}
    args |= {"max_model_len": max(options.tokens) + 64, "kv_host_gib": options.host_gib}
    tiers: dict[str, dict[str, Any]] = {
        "host": {},
        "disk": {"kv_disk_folder": str(folder / "kv")},
        "store": {"kv_store": True, "kv_store_wait_s": 30},
    }
    for tier in options.tier or tiers:
        for report in await measure(tier, args | tiers[tier], options, access):
            print(json.dumps(report), flush=True)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine-arg", action="append", default=[])
    parser.add_argument("--tier", action="append", choices=["host", "disk", "store"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[65, 129, 257, 513, 1001])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host-gib", type=float, default=0.5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, EmbeddedServer(Path(made) / "nats") as broker:
        asyncio.run(main(chosen, Path(made), broker))
