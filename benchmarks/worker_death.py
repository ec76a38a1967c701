"""The pause in a stream when its worker is killed (SIGKILL), and whether the text is still exact.

python -m benchmarks.worker_death
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

import openai

from headrace.workers.sim.tokens import expected_text
from tests.faults.test_workers_come_and_go import SLOW, holders
from tests.support.up_process import RunningUp

PROMPT = list(range(200, 260))
TOKENS = 300
SETTLED_S = 5.0  # members look after others only once they have been connected for a lease's length


def pause_s(up: RunningUp) -> tuple[float, bool]:
    """Return the longest time between two chunks after the kill, and whether every token was right."""
    text, longest_s, killed = "", 0.0, False
    with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=60) as api:
        stream = api.completions.create(
            model="sim", prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        last = time.perf_counter()
        for chunk in stream:
            now = time.perf_counter()
            if killed:
                longest_s = max(longest_s, now - last)
            last = now
            text += "".join(choice.text for choice in chunk.choices)
            if not killed and len(text) > 200:
                (pid,) = [pid for pid, runs in holders(up).values() if runs]
                os.kill(pid, signal.SIGKILL)
                killed, last = True, time.perf_counter()
    return longest_s, text == expected_text(PROMPT, TOKENS)


def kill(routers: str, times: int) -> None:
    """Kill the worker that has the stream, so many times, on one deployment."""
    with tempfile.TemporaryDirectory() as folder:
        up = RunningUp(Path(folder), "--workers", "2", "--routers", routers, *SLOW)
        try:
            up.until_ready()
            for _ in range(times):
                up.until("both workers are there", lambda: len(holders(up)) == 2)
                time.sleep(SETTLED_S)
                pause, exact = pause_s(up)
                print(f"{routers} routers: pause {pause:.2f} s, text {'exact' if exact else 'WRONG'}", flush=True)
            up.process.send_signal(signal.SIGINT)
            up.process.wait(30)
        finally:
            up.stop()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    arguments = parser.parse_args()
    for routers in ("0", "1"):
        kill(routers, arguments.kills)


if __name__ == "__main__":
    main()
