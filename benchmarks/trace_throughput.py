"""Measures what traces cost a deployment: requests/s and CPU, in turns without traces and with a share of the requests sampled.

Two deployments of the simulator with the `instant` timing run beside each other, one with traces to a receiver in a process of
its own, and the client asks one after the other, in the order A B B A. The median of the ratios of neighbouring rounds counts.

    python -m benchmarks.trace_throughput [--sample 0.1] [--rounds 12] [--streams 64] [--requests 1500] [--tokens 16]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.client import Workload
from benchmarks.deployment import Deployment
from benchmarks.keys_cost import INSTANT, Side, compare, spread

BOUND = 0.97  # of the requests/s without traces


class _Takes(BaseHTTPRequestHandler):
    """Takes every trace."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def _receive(port: Any) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Takes)
    port.send(server.server_address[1])
    server.serve_forever()


@contextmanager
def receiver() -> Iterator[str]:
    """Run a receiver in a process of its own. Yields its address."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_receive, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/v1/traces"
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Measure requests/s and CPU, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--port", type=int, default=9794, help="the first of two")
    options = parser.parse_args()
    with receiver() as url, tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        traces = ("--trace-endpoint", url, "--trace-sample", str(options.sample))
        plain = Deployment(Path(one), options.port, 1, arguments=INSTANT)
        traced = Deployment(Path(two), options.port + 1, 1, arguments=(*INSTANT, *traces))
        with plain, traced:
            sides = [Side("without", plain, ""), Side("with traces", traced, "")]
            workload = Workload(streams=options.streams, requests=options.requests, tokens=options.tokens)
            uvloop.run(compare(sides, workload, options.rounds))
    off, on = sides
    for side in sides:
        print(
            f"{side.name:<12} {statistics.median(side.rates):6.0f} requests/s, CPU of the frontend per request "
            f"{statistics.median(side.cpu_us):5.0f} µs"
        )
    print(f"requests/s, with / without: {spread(off.rates, on.rates)} (bound {BOUND})")
    print(f"CPU of the frontend per request, with / without: {spread(off.cpu_us, on.cpu_us)}")
    differences = [b - a for a, b in zip(off.cpu_us, on.cpu_us, strict=True)]
    print(f"more CPU of the frontend per request: median {statistics.median(differences):.0f} µs")
    print(f"{options.rounds} rounds of {options.requests} requests, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
