"""Measures the access log's line of a request in a frontend: CPU of its process, the write into a pipe with it.

    .venv/bin/python -m benchmarks.log_cost

The line is that of a streamed chat with all fields of its story, written as JSON by the logging of a frontend and in batches
by its thread. A process of its own reads the pipe, as `headrace up` does.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time

from headrace.base.logs import GATHER_S, LogStream, LogThread, configure
from headrace.frontend.http.middleware import AccessLog

BATCH = 20  # lines in the time that they are gathered, as of 1,000 requests/s
FIELDS = {
    "request_id": "01J9Z3M8T5QWERTYUIOPASDFGH",
    "route": "/v1/chat/completions",
    "status": 200,
    "model": "sim",
    "worker": "sim-7f3a91",
    "prompt_tokens": 110,
    "cached_tokens": 64,
    "output_tokens": 16,
    "attempts": 1,
    "queued_ms": 1.2,
    "first_token_ms": 8.4,
    "finish": "length",
    "seconds": 0.0213,
}


def measure(lines: int) -> float:
    """Return the microseconds of one line."""
    log = AccessLog()
    begun = time.process_time()
    for number in range(1, lines + 1):
        if log.takes(logging.INFO):
            log.write(logging.INFO, dict(FIELDS))
        if not number % BATCH:
            time.sleep(GATHER_S)
    return (time.process_time() - begun) / lines * 1e6


def main() -> None:
    """Print the median of the rounds, and the least and the most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lines", type=int, default=2000)
    args = parser.parse_args()
    reader = subprocess.Popen([sys.executable, "-c", "import sys\nfor line in sys.stdin.buffer: pass"], stdin=subprocess.PIPE)
    assert reader.stdin is not None
    pipe = os.fdopen(os.dup(reader.stdin.fileno()), "w")
    log = LogThread(LogStream(pipe))  # type: ignore[arg-type]
    log.start()
    configure(log_format="json", fields={"component": "frontend"}, stream=log)  # type: ignore[arg-type]
    measure(500)
    found = [measure(args.lines) for _ in range(args.rounds)]
    print(f"{statistics.median(found):.1f} us per line ({min(found):.1f} to {max(found):.1f}), load {os.getloadavg()[0]:.1f}")
    log.close()
    pipe.close()
    reader.stdin.close()
    reader.wait()


if __name__ == "__main__":
    main()
