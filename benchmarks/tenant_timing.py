"""Measures whether the speed of answers tells a tenant what others have asked, with caches of their own and with a shared one.

One tenant asks a prompt, then another one asks either the same prompt or one that is new, in random order, and takes
the time to the first token. If both kinds of times come from one distribution (Kolmogorov-Smirnov), they say nothing. A shared
cache is the control: there the same prompt must stand out.

    python -m benchmarks.tenant_timing [--pairs 200] [--words 300] [--prefill 20000]
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.deployment import Deployment

KEY = "operator"  # a key that speaks for others, so the header names the tenant


class Client:
    """A connection to a frontend, over which tenants ask one after the other."""

    def __init__(self, port: int, model: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._model = model

    def ask(self, tenant: str, prompt: str) -> float:
        """Return the seconds until an answer of one token is there. Raises SystemExit if there is none."""
        body = json.dumps({"model": self._model, "prompt": prompt, "max_tokens": 1})
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "x-headrace-tenant": tenant}
        began = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, headers)
        answer = self._connection.getresponse()
        text = answer.read()
        took = time.perf_counter() - began
        if answer.status != http.client.OK:
            raise SystemExit(f"{answer.status}: {text[:300]!r}")
        return took


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest distance of two empirical distributions."""
    values = sorted({*one, *other})
    ones, others, at_one, at_other, largest = sorted(one), sorted(other), 0, 0, 0.0
    for value in values:
        while at_one < len(ones) and ones[at_one] <= value:
            at_one += 1
        while at_other < len(others) and others[at_other] <= value:
            at_other += 1
        largest = max(largest, abs(at_one / len(ones) - at_other / len(others)))
    return largest


def chance(found: float, one: int, other: int) -> float:
    """Return how often samples of one distribution are at least so far apart (Kolmogorov's limit, for 50 values and more)."""
    scale = math.sqrt(one * other / (one + other))
    x = (scale + 0.12 + 0.11 / scale) * found
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))
    return 1.0 if x < 0.2 else min(1.0, max(0.0, sum(terms)))


def measure(options: argparse.Namespace, isolation: str) -> None:
    """Measure one deployment and print what its answers tell."""
    timing = json.dumps({"prefill_tokens_per_s": options.prefill, "decode_base_s": 0.001})
    arguments = ["--api-key", KEY, "--engine-arg", f"timing_overrides={timing}"]
    dice = random.Random(7)
    asked: list[float] = []
    fresh: list[float] = []
    words = [f"w{number}" for number in range(2000)]

    def prompt() -> str:
        return " ".join(dice.choices(words, k=options.words))

    with tempfile.TemporaryDirectory() as folder:
        setting = {"HEADRACE_FRONTEND_CACHE_ISOLATION": isolation}
        with Deployment(Path(folder), options.port, 1, arguments=arguments, environment=setting) as deployment:
            client = Client(options.port, deployment.model)
            for _ in range(20):
                client.ask("mallory", prompt())
            for _ in range(options.pairs):
                known, unknown = prompt(), prompt()
                client.ask("alice", known)
                for text, times in dice.sample([(known, asked), (unknown, fresh)], 2):
                    times.append(client.ask("mallory", text))
    found = distance(asked, fresh)
    print(
        f"isolation {isolation:<4} median {statistics.median(asked) * 1e3:6.2f} ms for a prompt that another tenant has asked, "
        f"{statistics.median(fresh) * 1e3:6.2f} ms for a new one; distance {found:.3f}, "
        f"p = {chance(found, len(asked), len(fresh)):.2g}"
    )


def main() -> None:
    """Measure with caches of their own, then with a shared one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--words", type=int, default=300, help="words of a prompt, about three tokens each")
    parser.add_argument("--prefill", type=float, default=20_000, help="prompt tokens a second of the simulated engine")
    parser.add_argument("--port", type=int, default=9796)
    options = parser.parse_args()
    for isolation in ("on", "off"):
        measure(options, isolation)
    print(f"{options.pairs} pairs, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
