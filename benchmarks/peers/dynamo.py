"""Headrace beside NVIDIA Dynamo, both up at once and asked in turns by the same client: requests/s and CPU per request.

    python -m venv DIR; DIR/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    DIR/bin/pip install torch transformers 'pydantic<=2.13.5' uvloop aiohttp certifi msgspec prometheus-client pyzmq tqdm \
        zstandard 'kubernetes<33' redis
    .venv/bin/python -m benchmarks.peers.dynamo --python DIR/bin/python --model FOLDER --rounds 3

Both run on one machine as their quick starts have them.  Headrace has one frontend, one router and one simulator worker; Dynamo
has its frontend in the router mode `kv`, requests over TCP, events over NATS, and its mocker with four workers, 1,000 times
as fast as the GPU it stands for.  Neither engine computes anything, so what is left is the serving.  CPU is that of all server
processes together, nats-server among them.  FOLDER has a tokenizer and a chat template; the simulator brings its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.deployment import Deployment
from benchmarks.serving import parts_of
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.tools.bench.load import Target, bodies, run_closed
from headrace.tools.bench.serve import usage

LEVELS = ((1, 200, 16), (64, 2000, 16), (64, 600, 128))  # streams, requests, tokens
HEADRACE_PORT, DYNAMO_PORT, NATS_PORT = 18930, 18931, 18932
START_S = 120.0
Figures = dict[str, float]


@contextmanager
def running(command: list[str], log: Path, env: dict[str, str]) -> Iterator[int]:
    """Run a process for the length of the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | env, start_new_session=True)
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def dynamo(python: Path, model: Path, folder: Path) -> Iterator[list[int]]:
    """Run Dynamo. Yields its processes, once it serves the model. Raises SystemExit if it does not."""
    (folder / "kv").mkdir()
    env = {"NATS_SERVER": f"nats://127.0.0.1:{NATS_PORT}", "DYN_FILE_KV": str(folder / "kv"), "DYN_LOG": "warn"}
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "nats"]
    frontend = [str(python), "-m", "dynamo.frontend", *planes, "--router-mode", "kv", "--http-port", str(DYNAMO_PORT)]
    mocker = [str(python), "-m", "dynamo.mocker", *planes, "--model-path", str(model), "--model-name", "sim"]
    mocker += ["--num-workers", "4", "--speedup-ratio", "1000", "--block-size", "64"]
    server = EmbeddedServer(folder / "nats", port=NATS_PORT)
    server.start()
    with ExitStack() as stack:
        stack.callback(server.stop)
        pids = [server.pid or 0]
        for name, command in (("frontend", frontend), ("mocker", mocker)):
            pids.append(stack.enter_context(running(command, folder / f"{name}.log", env)))
        end = time.monotonic() + START_S
        while not _serves(DYNAMO_PORT):
            if time.monotonic() > end:
                raise SystemExit(f"Dynamo does not serve:\n{(folder / 'mocker.log').read_text()[-2000:]}")
            time.sleep(0.5)
        yield pids


def _serves(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as answer:
            return bool(json.load(answer)["data"])
    except OSError:
        return False


async def ask(port: int, pids: list[int], level: tuple[int, int, int], seed: int, scale: float) -> Figures:
    """Ask one server at one level. Raises SystemExit for an answer that failed."""
    streams, requests, tokens = level
    requests = max(streams, int(requests * scale))
    asked = bodies("sim", requests=requests, words=64, tokens=tokens, seed=seed)
    before = sum(usage(pid).cpu_s for pid in pids)
    outcome = await run_closed(Target("127.0.0.1", port, "sim"), asked, streams=streams, timeout_s=300.0)
    if outcome.failed:
        raise SystemExit(f"port {port}: {outcome.failed} requests failed: {outcome.errors[0]}")
    return {
        "requests/s": outcome.ok / outcome.seconds,
        "tokens/s": outcome.chunks / outcome.seconds,
        "CPU µs per request": (sum(usage(pid).cpu_s for pid in pids) - before) / outcome.ok * 1e6,
        "TTFT p50 ms": outcome.percentile_ms("first_token_s", 0.5),
        "tokens per answer": outcome.chunks / outcome.ok,
    }


def measure(args: argparse.Namespace, ours: list[int], theirs: list[int]) -> None:
    """Ask both in turns, and print medians and the medians of the ratios of neighbouring rounds."""
    servers = {"headrace": (HEADRACE_PORT, ours), "dynamo": (DYNAMO_PORT, theirs)}
    for port, pids in servers.values():
        uvloop.run(ask(port, pids, (16, 300, 16), 0, 1.0))  # warm up
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for number, level in enumerate(LEVELS):
        found: dict[str, list[Figures]] = {name: [] for name in servers}
        for turn in range(args.rounds):
            for name in sorted(servers, reverse=bool(turn % 2)):
                port, pids = servers[name]
                found[name].append(uvloop.run(ask(port, pids, level, 1 + number * 1000 + turn, args.scale)))
        print(f"\n{level[0]} x {level[2]}")
        for figure in found["headrace"][0]:
            pairs = [(one[figure], other[figure]) for one, other in zip(found["headrace"], found["dynamo"], strict=True)]
            ratios = [one / other for one, other in pairs]
            print(
                f"  {figure:20} {median(one for one, _ in pairs):10,.1f} {median(other for _, other in pairs):10,.1f}"
                f"   ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
            sys.stdout.flush()


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of the environment that Dynamo is in")
    parser.add_argument("--model", type=Path, required=True, help="a folder with a tokenizer and a chat template")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of requests")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder) / "dynamo", Path(folder) / "headrace"
        theirs.mkdir()
        ours.mkdir()
        with dynamo(args.python, args.model, theirs) as pids, Deployment(ours, HEADRACE_PORT, 1, routers=1) as deployment:
            measure(args, list(parts_of(ours, deployment.pid, routers=1).values()), pids)


if __name__ == "__main__":
    main()
