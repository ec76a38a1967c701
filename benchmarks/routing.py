"""Measures the gain of routing by cached prefix over live NATS, and what a router costs.

    .venv/bin/python -m benchmarks.routing                        # simulated engines, then the cost; three rounds each
    .venv/bin/python -m benchmarks.routing --engine vllm          # two real vLLM workers on the CPU
    .venv/bin/python -m benchmarks.routing --rounds 5 --json out.json

A whole `headrace up` without a router, all real processes.  Per round every policy gets the same work in turn, in changing
order: `headrace router --policy …` joins the running deployment, and `none` is without one, when workers place requests on
themselves.  Every prompt is one of a few long prefixes and a short tail of its own; the prefixes together fit into the caches
of all workers, but not into that of one.  Each turn has prefixes of the same lengths in the same order, but of other words,
so that it begins with cold caches.  Cached tokens are those that engines report in `usage.prompt_tokens_details`.

Requests come from N connections in a closed loop, and again at a fixed rate that every policy can bear: only there are times
to first token those of the same load.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.client import Outcome, Workload, run_arrivals, run_bodies, run_workload
from benchmarks.deployment import Deployment, Router
from benchmarks.serving import row, snapshot
from headrace.tools.bench.serve import processes_of, usage

# Each a token of its own behind a space, in the vocabulary of the bundled model.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end
"""
WORDS = tuple(_WORDS.split())
POLICIES = ("kv", "round-robin", "none")
HOST = "127.0.0.1"
BUNDLED = Path(".headrace/models/smollm2-135m-instruct")


@dataclass(frozen=True, kw_only=True)
class Families:
    """Prompts of `prefixes` families. Lengths in words, which are tokens; `rate` in requests/s."""

    prefixes: int
    prefix_words: int
    tail_words: int
    output_tokens: int
    streams: int
    requests: int
    rate: float

    def bodies(self, salt: str, seed: int, model: str) -> list[bytes]:
        """Return the same families in the same order for every `salt`, in other words."""
        words = random.Random(salt)
        order = random.Random(seed)
        prefixes = [" ".join(words.choices(WORDS, k=self.prefix_words)) for _ in range(self.prefixes)]
        return [self._body(prefixes[order.randrange(self.prefixes)], words, model) for _ in range(self.requests)]

    def _body(self, prefix: str, words: random.Random, model: str) -> bytes:
        tail = " ".join(words.choices(WORDS, k=self.tail_words))
        return json.dumps(
            {
                "model": model,
                "messages": [{"role": "system", "content": prefix}, {"role": "user", "content": tail}],
                "max_tokens": self.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    def ceiling(self) -> float:
        """Part of the prompt tokens that one cache for everything would have saved, chat template left out."""
        hits = self.requests - self.prefixes
        return hits * self.prefix_words / (self.requests * (self.prefix_words + self.tail_words))


# 1,500 blocks of prefixes and 600 in each of four caches: 1.6 times all of them together, and two fifths alone.
SIM = Families(prefixes=24, prefix_words=2000, tail_words=40, output_tokens=16, streams=24, requests=360, rate=16.0)
SIM_TIMING = {"prefill_tokens_per_s": 8000.0, "decode_base_s": 0.015, "decode_per_sequence_s": 0.0002}
SIM_ARGS = {"blocks": 600, "context_length": 4096, "slots": 16, "timing_overrides": json.dumps(SIM_TIMING)}

# 114 blocks of prefixes and 80 in each of two caches, of which running requests take up to 20 for what is their own.
VLLM = Families(prefixes=6, prefix_words=600, tail_words=20, output_tokens=8, streams=4, requests=60, rate=1.2)
VLLM_ARGS = {"num_gpu_blocks_override": 80, "max_model_len": 1024, "dtype": "bfloat16", "max_num_seqs": 4}

COST = (
    Workload(streams=1, requests=400, tokens=16),
    Workload(streams=16, requests=3000, tokens=16),
    Workload(streams=64, requests=6000, tokens=16),
)


@contextlib.contextmanager
def routed(deployment: Deployment, policy: str, workers: int, port: int) -> Iterator[Router | None]:
    """With a router of this policy, or with none."""
    if policy == "none":
        yield None
        return
    with Router(deployment, policy, workers=workers, metrics_port=port) as router:
        yield router


def in_turn(policies: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: in each, another one is first."""
    at = number % len(policies)
    return [*policies[at:], *policies[:at]]


def placed(router: Router | None) -> dict[str, float]:
    """Return the router's counters: placements by reason, and tokens that it judged wrong."""
    if router is None:
        return {}
    kept = ("placed_total", "shed_total", "overlap_", "approximate_workers", "decision_seconds_", "kv_lost_total")
    return {
        name.removeprefix("headrace_router_"): value
        for name, value in router.metrics().items()
        if name.removeprefix("headrace_router_").startswith(kept) and "_created" not in name and "_bucket" not in name
    }


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return the figures of one turn."""
    return {
        "requests": outcome.ok,
        "failed": outcome.failed,
        "errors": outcome.errors[:3],
        "seconds": outcome.seconds,
        "req_s": outcome.ok / outcome.seconds,
        "ttft_p50_ms": outcome.percentile_ms("first_token_s", 0.5),
        "ttft_p90_ms": outcome.percentile_ms("first_token_s", 0.9),
        "total_p50_ms": outcome.percentile_ms("total_s", 0.5),
        "reported": outcome.reported,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "cached": outcome.cached_tokens / max(1, outcome.prompt_tokens),
        "load_average": os.getloadavg()[0],
    }


def families(args: argparse.Namespace, deployment: Deployment, work: Families, workers: int) -> list[dict[str, Any]]:
    """Run each policy in turn, `rounds` times: closed loop, then at the fixed rate."""
    turns = []
    warm = Families(prefixes=2, prefix_words=40, tail_words=8, output_tokens=4, streams=2, requests=8, rate=1.0)
    uvloop.run(run_bodies(HOST, args.port, warm.bodies("warm", 0, deployment.model), streams=2))
    for number in range(args.rounds):
        clock = random.Random(number)
        at_s = list(itertools.accumulate(clock.expovariate(work.rate) for _ in range(work.requests)))
        for policy in in_turn(args.policies, number):
            for load in args.loads:
                bodies = work.bodies(f"{policy} {load} {number}", number, deployment.model)
                with routed(deployment, policy, workers, args.port + 1) as router:
                    if load == "closed":
                        outcome = uvloop.run(run_bodies(HOST, args.port, bodies, streams=work.streams))
                    else:
                        outcome = uvloop.run(run_arrivals(HOST, args.port, bodies, at_s=at_s))
                    turn = {"round": number, "policy": policy, "load": load, **figures(outcome), "router": placed(router)}
                turns.append(turn)
                print(
                    f"round {number + 1}, {policy}, {load}: {turn['cached']:.1%} cached, TTFT p50 {turn['ttft_p50_ms']:.0f} "
                    f"p90 {turn['ttft_p90_ms']:.0f} ms, {turn['req_s']:.2f} req/s, failed {turn['failed']}, "
                    f"load average {turn['load_average']:.1f}",
                    file=sys.stderr,
                )
    return turns


def cost(args: argparse.Namespace, deployment: Deployment) -> list[dict[str, Any]]:
    """With and without a router in turn, where engines take no time."""
    turns = []
    first = 1_000_000
    uvloop.run(run_workload(HOST, args.port, Workload(16, 500, 16), first=first))
    for number in range(args.rounds):
        for policy in in_turn([p for p in args.policies if p != "round-robin"], number):
            with routed(deployment, policy, 1, args.port + 1) as router:
                parts = processes_of(deployment.data_dir, deployment.pid) | ({"router": router.pid} if router else {})
                for workload in COST:
                    first += workload.requests
                    before = snapshot(parts)
                    outcome = uvloop.run(run_workload(HOST, args.port, workload, first=first))
                    found = row(workload, outcome, before, snapshot(parts))
                    turns.append(
                        {"round": number, "policy": policy, "load": f"{workload.streams} × {workload.tokens}"}
                        | found
                        | {"ttft_p90_ms": outcome.percentile_ms("first_token_s", 0.9), "load_average": os.getloadavg()[0]}
                    )
                    print(
                        f"round {number + 1}, {policy}, {workload.streams} x {workload.tokens}: {found['req_s']:.0f} req/s, "
                        f"TTFT p50 {found['ttft_p50_ms']:.1f} ms, failed {found['failed']}",
                        file=sys.stderr,
                    )
                if router:
                    turns[-1]["router"] = placed(router)
    return turns


def median(turns: Sequence[dict[str, Any]], policy: str, load: str, name: str) -> float:
    """Over the rounds."""
    return float(statistics.median(t[name] for t in turns if t["policy"] == policy and t["load"] == load))


def ratios(turns: Sequence[dict[str, Any]], load: str, name: str, over: str) -> tuple[float, float, float]:
    """kv over another one, of the same rounds: median, least, most."""
    of = {(t["round"], t["policy"]): t[name] for t in turns if t["load"] == load}
    found = [of[number, "kv"] / of[number, over] for number, policy in of if policy == over]
    return statistics.median(found), min(found), max(found)


def table(turns: Sequence[dict[str, Any]]) -> str:
    """Markdown: medians over the rounds, then the ratios of the same rounds."""
    lines = ["| load | policy | cached tokens | TTFT p50 / p90 ms | req/s |", "|---|---|---|---|---|"]
    names = ("cached", "ttft_p50_ms", "ttft_p90_ms", "req_s")
    for load in dict.fromkeys(t["load"] for t in turns):
        policies = list(dict.fromkeys(t["policy"] for t in turns if t["load"] == load))
        for policy in sorted(policies, key=POLICIES.index):
            cached, p50, p90, rate = (median(turns, policy, load, name) for name in names)
            lines.append(f"| {load} | {policy} | {cached:.1%} | {p50:,.0f} / {p90:,.0f} | {rate:,.2f} |")
        for over in [p for p in policies if p != "kv"] if "kv" in policies else []:
            cells = ["{:.2f} ({:.2f}–{:.2f})".format(*ratios(turns, load, name, over)) for name in names]
            lines.append(f"| {load} | kv : {over} | {cells[0]} | {cells[1]} / {cells[2]} | {cells[3]} |")
    return "\n".join(lines)


def cost_table(turns: Sequence[dict[str, Any]]) -> str:
    """Markdown: the turn with the median rate."""
    lines = [
        "| streams × tokens | router | req/s (min–max) | TTFT p50 / p90 ms | CPU µs/request: frontend, worker, nats, router |",
        "|---|---|---|---|---|",
    ]
    for load in dict.fromkeys(t["load"] for t in turns):
        for policy in ("none", "kv"):
            same = sorted((t for t in turns if (t["policy"], t["load"]) == (policy, load)), key=lambda t: t["req_s"])
            if not same:
                continue
            r = same[len(same) // 2]
            cpu = [r["cpu_us_per_request"].get(part, 0.0) for part in ("frontend", "worker-1", "nats-server", "router")]
            lines.append(
                f"| {load} | {policy} | {r['req_s']:,.0f} ({same[0]['req_s']:,.0f}–{same[-1]['req_s']:,.0f}) "
                f"| {r['ttft_p50_ms']:.1f} / {r['ttft_p90_ms']:.1f} | {', '.join(f'{c:,.0f}' for c in cpu)} |"
            )
    return "\n".join(lines)


def engine_args(values: dict[str, Any]) -> list[str]:
    """As `headrace up` takes them."""
    return [word for key, value in values.items() for word in ("--engine-arg", f"{key}={value}")]


def run_case(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run one deployment, and measure everything on it."""
    with tempfile.TemporaryDirectory() as folder:
        if name == "vllm":
            arguments, workers, engine, timeout_s = engine_args(VLLM_ARGS), 2, "vllm", 300.0
            if args.vllm_model.exists():
                arguments += ["--model", str(args.vllm_model.resolve())]
        else:
            arguments, workers, engine, timeout_s = engine_args({} if name == "cost" else SIM_ARGS), 4, "sim", 60.0
        if name == "cost":
            workers = 1
        work = {"sim": SIM, "vllm": VLLM}.get(name)
        with Deployment(
            Path(folder), args.port, workers, engine=engine, arguments=arguments, timeout_s=timeout_s
        ) as deployment:
            turns = families(args, deployment, work, workers) if work else cost(args, deployment)
            rss = {part: usage(pid).rss / 2**20 for part, pid in processes_of(deployment.data_dir, deployment.pid).items()}
            log = deployment.log
        print(f"\n{name}, {workers} worker(s)" + (f", {work}; ceiling {work.ceiling():.1%} cached" if work else ""))
        print((table(turns) if work else cost_table(turns)) + "\n")
        if troubles := [line for line in log.splitlines() if "warning" in line or "error" in line]:
            print(f"log of `up`, its last troubles of {len(troubles)}:", *troubles[-5:], sep="\n", file=sys.stderr)
        return {"case": name, "work": asdict(work) if work else None, "workers": workers, "turns": turns, "rss_mib": rss}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--cases", help="sim, cost, vllm, separated by commas; default: sim,cost or vllm, by --engine")
    parser.add_argument("--port", type=int, default=18090, help="the router's metrics are on the next one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--loads", default="closed,rate")
    parser.add_argument("--vllm-model", type=Path, default=BUNDLED, help="where it is not, the bundled one is made first")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    args.policies, args.loads = args.policies.split(","), args.loads.split(",")
    if unknown := set(args.policies) - set(POLICIES):
        parser.error(f"--policies: {min(unknown)!r} is none of {', '.join(POLICIES)}")
    if unknown := set(args.loads) - {"closed", "rate"}:
        parser.error(f"--loads: {min(unknown)!r} is neither closed nor rate")
    conditions = f"{os.cpu_count()} cores shared by everything, Python {platform.python_version()}, {args.rounds} round(s)"
    print(f"{conditions}, load average before {os.getloadavg()[0]:.2f}")
    cases = (args.cases or ("vllm" if args.engine == "vllm" else "sim,cost")).split(",")
    done = [run_case(args, name) for name in cases]
    if args.json:
        args.json.write_text(json.dumps({"conditions": conditions, "cases": done}, indent=1))
    if any(turn["failed"] for case in done for turn in case["turns"]):
        raise SystemExit("some requests failed")


if __name__ == "__main__":
    main()
