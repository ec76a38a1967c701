"""A client process of the growth benchmark: asks in a closed loop for some seconds, as often as it is told to.

    python -m benchmarks.growth.asking PORT NUMBER

Each line of its input orders a run: `{"streams": 16, "tokens": 16, "seconds": 4.0, "prepare": 6000}`.  It then makes so many
bodies, says `{"ready": true}`, waits for one more line, asks, and says what it counted.  Answers that are under way when the
time is over are waited for and count, with the time they took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator

import uvloop

from headrace.tools.bench.load import Outcome, Target, bodies, run_closed
from headrace.tools.bench.serve import usage

WORDS = 32
GRACE_S = 30.0


def until(made: list[bytes], end_s: float, more: Iterator[bytes]) -> Iterator[bytes]:
    """Yield bodies, first those that were made before, until the time is over."""
    for body in made:
        if time.perf_counter() >= end_s:
            return
        yield body
    for body in more:
        if time.perf_counter() >= end_s:
            return
        yield body


def endless(tokens: int, seed: int) -> Iterator[bytes]:
    """Yield bodies that are made one by one: dearer for the client than those made before."""
    number = 0
    while True:
        number += 1
        yield from bodies("sim", requests=1, words=WORDS, tokens=tokens, seed=seed + number)


def told(outcome: Outcome, cpu_s: float, late: bool) -> dict[str, object]:
    """Return what the parent wants to know. `made_late`: more bodies were needed than had been made."""
    return {
        "seconds": outcome.seconds,
        "ok": outcome.ok,
        "failed": outcome.failed,
        "chunks": outcome.chunks,
        "ttft_p50_ms": outcome.percentile_ms("first_token_s", 0.5),
        "ttft_p99_ms": outcome.percentile_ms("first_token_s", 0.99),
        "total_p50_ms": outcome.percentile_ms("total_s", 0.5),
        "cpu_s": cpu_s,
        "made_late": late,
        "errors": outcome.errors[:3],
    }


def main() -> None:
    """Serve orders until the input ends."""
    port, number = int(sys.argv[1]), int(sys.argv[2])
    server = Target("127.0.0.1", port, "sim")
    for turn, line in enumerate(sys.stdin):
        order = json.loads(line)
        seed = (number * 1000 + turn) * 1_000_000
        made = bodies("sim", requests=order["prepare"], words=WORDS, tokens=order["tokens"], seed=seed)
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        before = usage(os.getpid()).cpu_s
        end_s = time.perf_counter() + order["seconds"]
        asked = until(made, end_s, endless(order["tokens"], seed + 1))
        outcome = uvloop.run(run_closed(server, asked, streams=order["streams"], timeout_s=order["seconds"] + GRACE_S))
        cpu_s = usage(os.getpid()).cpu_s - before
        print(json.dumps(told(outcome, cpu_s, outcome.ok > len(made))), flush=True)


if __name__ == "__main__":
    main()
