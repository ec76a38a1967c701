"""A batch, or `headrace submit`, of many lines while frontend, router, workers and the server are killed at random.

Each line must be exactly once in the right file, with the answer that the simulator is known to give. The supervisor restarts
what was killed; a killed `headrace submit` is started again by the same command.

python -m benchmarks.batches.kills --lines 50000
python -m benchmarks.batches.kills --lines 50000 --submit
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai

from benchmarks.batches.lines import ENDS, engine_of
from benchmarks.deployment import Deployment
from headrace.tools.bench.serve import processes_of
from headrace.workers.sim.tokens import expected_text

PATH = "/v1/completions"
TOKENS = 4
REFUSED = 50  # each so many-th line is one that its API refuses
POLL_S = 0.25
LONGEST_S = 900.0
VICTIMS = ("frontend", "router-1", "worker-1", "worker-2", "nats-server")


def prompt(number: int) -> list[int]:
    """Return the token ids of a line's prompt, which no other line has."""
    return [300 + number // 1000, 400 + number % 1000, *range(500, 520)]


def write_input(file: Path, lines: int, model: str) -> None:
    """Write the lines of a batch."""
    with file.open("w") as out:
        for number in range(lines):
            tokens = -1 if number % REFUSED == 0 else TOKENS
            body = {"model": model, "prompt": prompt(number), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            out.write(json.dumps({"custom_id": f"c{number}", "method": "POST", "url": PATH, "body": body}) + "\n")


def check(lines: int, output: Iterator[str], errors: Iterator[str]) -> None:
    """Raise SystemExit unless each line is exactly once in the right file, with its answer."""
    answered, refused = (Counter[str](), Counter[str]())
    for text in output:
        line = json.loads(text)
        answered[line["custom_id"]] += 1
        got = line["response"]["body"]["choices"][0]["text"]
        if got != expected_text(prompt(int(line["custom_id"][1:])), TOKENS):
            raise SystemExit(f"line {line['custom_id']} has another answer: {got!r}")
    for text in errors:
        line = json.loads(text)
        refused[line["custom_id"]] += 1
        if line["response"]["status_code"] != 400:
            raise SystemExit(f"line {line['custom_id']} has status {line['response']['status_code']}")
    wanted = Counter(f"c{number}" for number in range(lines))
    right = Counter(f"c{number}" for number in range(0, lines, REFUSED))
    if refused != right or answered != wanted - right:
        wrong = [*(answered - (wanted - right)), *((wanted - right) - answered), *(refused - right), *(right - refused)]
        raise SystemExit(f"{len(wrong)} lines are missing, twice there or in the wrong file, such as {wrong[:5]}")
    print(f"each of {lines} lines is exactly once in the right file: {len(answered)} answered, {len(refused)} refused")


class Killer:
    """Kills a random process every so often, so that all of them get their turn."""

    def __init__(self, deployment: Deployment, pause_s: float, seed: int) -> None:
        self._deployment, self._pause_s = deployment, pause_s
        self._random = random.Random(seed)
        self._next_s = time.monotonic() + pause_s
        self._turn: list[str] = []
        self.killed = Counter[str]()

    def due(self) -> None:
        """Kill a process if it is time."""
        if time.monotonic() < self._next_s:
            return
        if not self._turn:
            self._turn = self._random.sample(VICTIMS, len(VICTIMS))
        name = self._turn[-1]
        if (pid := self._pid(name)) is None:  # it is just being started again
            return
        os.kill(pid, signal.SIGKILL)
        self.killed[name] += 1
        self._turn.pop()
        self._next_s = time.monotonic() + self._pause_s * self._random.uniform(0.5, 1.5)

    def _pid(self, name: str) -> int | None:
        return processes_of(self._deployment.data_dir, self._deployment.pid).get(name)


def patiently(ask: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
    """Ask until there is an answer. Raises SystemExit after too long."""
    end = time.monotonic() + LONGEST_S
    while True:
        meanwhile()
        try:
            return ask()
        except (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError):
            if time.monotonic() > end:
                raise SystemExit("the deployment does not answer any more") from None
            time.sleep(POLL_S)


def run_batch(client: openai.OpenAI, file: Path, lines: int, killer: Killer) -> None:
    """Run the file as a batch while processes are killed, and check both of its files."""
    uploaded = client.files.create(file=file, purpose="batch")
    made = client.batches.create(input_file_id=uploaded.id, endpoint=PATH, completion_window="24h")
    while True:
        batch = patiently(lambda: client.batches.retrieve(made.id), killer.due)
        if batch.status in ENDS:
            break
        time.sleep(POLL_S)
    print(f"{batch.status}: {batch.request_counts}", flush=True)
    contents = [
        patiently(lambda file_id=file_id: client.files.content(file_id).text, lambda: None)  # type: ignore[misc]
        for file_id in (batch.output_file_id, batch.error_file_id)
    ]
    check(lines, iter(contents[0].splitlines()), iter(contents[1].splitlines()))


def run_submit(deployment: Deployment, file: Path, lines: int, killer: Killer, pause_s: float) -> None:
    """Run `headrace submit` on the file, killing it as well, and check its output. Its results are all in one file."""
    out = file.with_name("out.jsonl")
    command = [sys.executable, "-m", "headrace", "submit", str(file), "--out", str(out), "--data-dir", str(deployment.data_dir)]
    started, next_s = 0, 0.0
    end = time.monotonic() + LONGEST_S
    while True:
        with (deployment.data_dir / "submit.log").open("ab") as log:
            submit = subprocess.Popen(command, stdout=log, stderr=log, cwd=deployment.data_dir)
        started += 1
        next_s = time.monotonic() + 3 * pause_s
        while submit.poll() is None and time.monotonic() < next_s:
            killer.due()
            time.sleep(POLL_S)
        if submit.poll() is None:
            submit.kill()
        submit.wait()
        written = sum(1 for _ in out.open("rb")) if out.exists() else 0
        if written >= lines or time.monotonic() > end:
            break
    print(f"`headrace submit` was started {started} times by the same command", flush=True)
    found = [json.loads(line) for line in out.open() if line.strip()]
    answered = (json.dumps(line) for line in found if (line["response"] or {}).get("status_code") == 200)
    check(lines, answered, (json.dumps(line) for line in found if (line["response"] or {}).get("status_code") != 200))


def main() -> None:
    """Run the lines once and print what was killed meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--pause-s", type=float, default=6.0, help="mean time between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=18081)
    parser.add_argument("--submit", action="store_true", help="with `headrace submit` in place of a batch")
    wishes = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder), wishes.port, 2, routers=1, arguments=engine_of(0.002))
        url = f"http://127.0.0.1:{wishes.port}/v1"
        with deployment, openai.OpenAI(base_url=url, api_key="none", timeout=30, max_retries=0) as client:
            file = Path(folder) / "in.jsonl"
            write_input(file, wishes.lines, deployment.model)
            killer, began = Killer(deployment, wishes.pause_s, wishes.seed), time.perf_counter()
            if wishes.submit:
                run_submit(deployment, file, wishes.lines, killer, wishes.pause_s)
            else:
                run_batch(client, file, wishes.lines, killer)
            seconds = time.perf_counter() - began
        print(f"{seconds:.0f} s, {sum(killer.killed.values())} kills: {dict(sorted(killer.killed.items()))}")


if __name__ == "__main__":
    main()
