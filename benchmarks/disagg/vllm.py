"""Prefill on one vLLM, decode on another: is the text the same, and how long does the first token take?

    .venv/bin/python -m benchmarks.disagg.vllm                     # both parts, both ways of moving blocks
    .venv/bin/python -m benchmarks.disagg.vllm --parts text --modes push --prompts 24 --tokens 24
    .venv/bin/python -m benchmarks.disagg.vllm --parts time --lengths 128 512 1500 --rounds 7 --json out.json

Real engines (the bundled model, float32, temperature 0), each in a process of its own and used through the engine protocol,
without NATS; a sequence is always alone.

Text: what a vLLM without a connector answers is compared, token by token, with what a pair answers that has nothing of the
prompt cached, and with what it answers when the decode side has the first half cached.

Time: from submitting a prompt that no cache knows to its first token.  `local` computes it on the decode side's engine.
`remote` is split: `queue` is the wait in the prefill side's vLLM, `prefill` its computation, `transfer` the wait of the decode
side's vLLM, in which the blocks come, `first step` that of the decode side, and `between` the rest: passing the parameters on,
and the processes of the two engines.  `added` is remote less local: what the longer way costs when nothing is in the way.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.broker.messages.requests import Sampling
from headrace.workers import bundled_model
from headrace.workers.engine import EngineConfig, Handover, Output, Role, Sequence
from tests.engines.support.remote import RemoteEngine

ROOT = Path(__file__).parents[2]
ARGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 8}
MODES = ("push", "pull")
PARTS = ("queue", "prefill", "transfer", "first step", "between")
SHORTEST, LONGEST = 32, 1500

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Step:
    """Times of the parts of a hand-over, in seconds: they add up to `total_s`."""

    total_s: float
    parts_s: dict[str, float]


def split(total_s: float, prefill: Output, decode: Output) -> Step:
    """From the first outputs of both sides, which say how long they were queued and computed."""
    before, after = prefill.extra or {}, decode.extra or {}
    parts = {
        "queue": before["queued_s"],
        "prefill": before["computed_s"],
        "transfer": after["queued_s"],
        "first step": after["computed_s"],
    }
    return Step(total_s, parts | {"between": total_s - sum(parts.values())})


def sequence(tokens: list[int], sampling: Sampling, handover: Handover | None = None, name: str | None = None) -> Sequence:
    """Return a sequence for an engine; the decode side's has the name of the prefill side's."""
    name = name or f"b{next(_numbers)}-1-0"
    return Sequence(id=name, token_ids=tokens, prompt_tokens=len(tokens), sampling=sampling, handover=handover)


def greedy(tokens: int) -> Sampling:
    """So many tokens, the likeliest each time."""
    return Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def ids_of(outputs: Seq[Output]) -> list[int]:
    """Return the tokens. Raises RuntimeError if the sequence failed."""
    if outputs[-1].fault is not None:
        raise RuntimeError(f"a sequence failed: {outputs[-1].fault}")
    return [token for output in outputs for token in output.ids]


class Pair:
    """A prefill side and a decode side."""

    def __init__(self, prefill: RemoteEngine, decode: RemoteEngine) -> None:
        self.prefill, self.decode = prefill, decode

    async def run(self, tokens: list[int], sampling: Sampling) -> tuple[list[Output], Step]:
        """Run one prompt by way of both. Returns the outputs of the decode side, and the times of the way to the first."""
        begun = time.monotonic()
        first = sequence(tokens, sampling, Handover(kind="prefill"))
        offered = (await self.prefill.run(first))[-1]
        if offered.handover is None:
            raise RuntimeError(f"the prefill side failed: {offered.fault}")
        await self.decode.submit(sequence(tokens, sampling, Handover(kind="decode", params=offered.handover), first.id))
        outputs = await self.decode.end(first.id)
        ids_of(outputs)
        return outputs, split(self.decode.outputs[first.id][0][0] - begun, offered, outputs[0])

    async def forget(self) -> None:
        """Empty both caches."""
        for side in (self.prefill, self.decode):
            await side.control("reset_prefix_cache", {})


def remote_engine(model: Path, role: Role, args: dict[str, Any], threads: int) -> RemoteEngine:
    """Return an engine that is yet to be started."""
    config = EngineConfig(model=str(model), served_name="m", role=role, args=ARGS | args)
    return RemoteEngine(config, environ={"OMP_NUM_THREADS": str(threads)})


def prompts(model: Path, count: int) -> list[list[int]]:
    """Texts of our own documentation, each from another place, of lengths spread evenly over the powers."""
    from tokenizers import Tokenizer

    text = "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    tokens: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    lengths = [round(SHORTEST * (LONGEST / SHORTEST) ** (n / max(1, count - 1))) for n in range(count)]
    apart = (len(tokens) - LONGEST) // count
    return [tokens[n * apart : n * apart + length] for n, length in enumerate(lengths)]


def compare(expected: list[list[int]], got: list[list[int]]) -> dict[str, Any]:
    """Count equal answers, and find where the first other one leaves the path."""
    differing = [n for n, (one, other) in enumerate(zip(expected, got, strict=True)) if one != other]
    found: dict[str, Any] = {"prompts": len(expected), "equal": len(expected) - len(differing)}
    if differing:
        n = differing[0]
        at = next(i for i, pair in enumerate(itertools.zip_longest(expected[n], got[n])) if pair[0] != pair[1])
        found["first_divergence"] = {"prompt": n, "at": at, "expected": expected[n][at:], "got": got[n][at:]}
    return found


async def texts(pair: Pair, given: list[list[int]], expected: list[list[int]], tokens: int) -> dict[str, Any]:
    """Compare a pair's answers with those expected, with empty caches and with half of the prompt on the decode side."""
    sampling = greedy(tokens)
    cold, warm, cached = [], [], []
    await pair.forget()
    for prompt in given:
        outputs, _ = await pair.run(prompt, sampling)
        cold.append(ids_of(outputs))
    await pair.forget()
    for prompt in given:
        await pair.decode.run(sequence(prompt[: len(prompt) // 2], greedy(1)))
        outputs, _ = await pair.run(prompt, sampling)
        warm.append(ids_of(outputs))
        cached.append(outputs[0].cached_tokens or 0)
    await pair.prefill.until_blocks_used(0)
    await pair.decode.until_blocks_used(0)
    return {"cold": compare(expected, cold), "cached_prefix": compare(expected, warm) | {"cached_tokens": sum(cached)}}


async def times(pair: Pair, lengths: Seq[int], rounds: int) -> list[dict[str, Any]]:
    """Medians of local and remote first tokens, per length."""

    def fresh(length: int) -> list[int]:
        seed = next(_numbers)
        return [(seed * 7919 + n * 31) % 40_000 + 100 for n in range(length)]

    await pair.run(fresh(64), greedy(1))  # they meet
    rows = []
    for length in lengths:
        local, remote = [], []
        for _ in range(rounds):  # in turn, so that both see the same machine
            alone = sequence(fresh(length), greedy(1))
            await pair.decode.run(alone)
            local.append(pair.decode.first_output_s(alone.id))
            _, step = await pair.run(fresh(length), greedy(1))
            remote.append(step)
        parts = {name: statistics.median(step.parts_s[name] for step in remote) for name in PARTS}
        row = {"tokens": length, "local_s": statistics.median(local), "remote_s": statistics.median(s.total_s for s in remote)}
        rows.append(row | {"added_s": row["remote_s"] - row["local_s"], "parts_s": parts})
    return rows


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for."""
    model = bundled_model.prepare(args.data_dir / "models" / bundled_model.NAME, progress=print)
    given = prompts(model, args.prompts)
    report: dict[str, Any] = {"machine": {"cores": os.cpu_count(), "python": platform.python_version()}, "rounds": args.rounds}
    report["threads"] = args.threads
    expected: list[list[int]] = []
    if "text" in args.parts:
        async with remote_engine(model, Role.AGGREGATED, {}, args.threads) as alone:
            expected = [ids_of(await alone.run(sequence(prompt, greedy(args.tokens)))) for prompt in given]
    for mode in args.modes:
        settings = {"kv_transfer_mode": mode}
        async with (
            remote_engine(model, Role.PREFILL, settings, args.threads) as prefill,
            remote_engine(model, Role.DECODE, settings, args.threads) as decode,
        ):
            pair = Pair(prefill, decode)
            found = report[mode] = {}
            if "time" in args.parts:
                found["time"] = await times(pair, args.lengths, args.rounds)
            if "text" in args.parts:
                found["text"] = await texts(pair, given, expected, args.tokens)
        show(mode, found)
    return report


def show(mode: str, found: dict[str, Any]) -> None:
    """Print what was found of one way of moving blocks."""
    for case, result in found.get("text", {}).items():
        print(f"{mode}, {case}: {json.dumps(result)}", flush=True)
    if rows := found.get("time"):
        print(f"{mode}, medians in ms:")
        print("".join(f"{name:>12}" for name in ("tokens", "local", "remote", "added", *PARTS)))
        for row in rows:
            values = [row["local_s"], row["remote_s"], row["added_s"], *(row["parts_s"][name] for name in PARTS)]
            print(f"{row['tokens']:>12}" + "".join(f"{1000 * value:>12.1f}" for value in values), flush=True)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("text", "time"), default=["text", "time"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--prompts", type=int, default=24, help="how many prompts of 32 to 1,500 tokens")
    parser.add_argument("--tokens", type=int, default=24, help="length of every answer")
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 1500], help="prompts for the times, in tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of every engine")
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("HEADRACE_DATA_DIR", ROOT / ".headrace")))
    parser.add_argument("--json", type=Path, help="write everything here")
    args = parser.parse_args()
    report = asyncio.run(measure(args))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
