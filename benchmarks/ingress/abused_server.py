"""The server that `benchmarks.ingress.abuse` attacks, in a process of its own, and how long its event loop is blocked.

uvicorn, uvloop, this package and a fake ingress that answers at once.  It says its port on standard output, and answers `reset`
and `report` on standard input, each with a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import structlog
import uvloop
from tokenizers import Tokenizer

from benchmarks.ingress.cost import TEMPLATE, FakeIngress, Models, Served, tokenizer
from headrace.broker.models.cards import MediaSlot, ModelCard
from headrace.frontend.app import build_frontend
from headrace.frontend.http.loop import return_large
from headrace.frontend.server import quiet_gc, share_evenly
from headrace.frontend.serving import listen, serve
from headrace.frontend.settings import FrontendSettings

CONTEXT = 1_100_000


async def run_server() -> None:
    """Serve on a free port until killed."""
    settings = FrontendSettings(port=0, access_log=False, media_private=True, header_timeout_s=5, drain_grace_s=0)
    known = Tokenizer.from_str(tokenizer().decode())
    known.add_special_tokens(["<|image|>"])
    files = {"tokenizer.json": known.to_str().encode(), "chat_template.jinja": TEMPLATE.encode()}
    ingress = FakeIngress(files, 1)
    slots = {"image": MediaSlot("<|image|>", known.token_to_id("<|image|>"), 64)}
    card = ModelCard(
        model="bench", pool="bench-0", context_length=CONTEXT, block_size=16, vocab_size=2000, media=slots, default_max_tokens=4
    )
    ingress.models = Models(Served(card, files))
    frontend = build_frontend(ingress, settings)
    listener = listen(settings)
    gauge = Gauge()
    quiet_gc()
    share_evenly()
    return_large()

    def announce(url: str) -> None:
        print(json.dumps({"port": int(url.rsplit(":", 1)[1])}), flush=True)

    def command() -> None:
        line = sys.stdin.readline().strip()
        if line == "reset":
            gauge.reset()
        print(json.dumps(gauge.report() | {"refused": _refused(frontend.metrics)}), flush=True)

    asyncio.get_running_loop().add_reader(sys.stdin, command)

    async def drain(grace_s: float) -> None:
        pass

    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(gauge.tick())
        await serve(frontend, settings, listener, drain=drain, on_listening=announce)
        ticking.cancel()


def _refused(metrics: Any) -> float:
    return sum(sample.value for sample in next(iter(metrics.connections_refused.collect())).samples if "_total" in sample.name)


class Gauge:
    """The longest gap between two wakings, and the longest that this process can have made itself, by what it computed."""

    def __init__(self) -> None:
        self.wall = self.cpu = self.loop = 0.0

    async def tick(self) -> None:
        while True:
            wall, cpu, loop = time.perf_counter(), time.process_time(), time.thread_time()
            await asyncio.sleep(0.001)
            blocked = time.perf_counter() - wall - 0.001
            self.wall = max(self.wall, blocked)
            self.cpu = max(self.cpu, min(blocked, time.process_time() - cpu))
            self.loop = max(self.loop, min(blocked, time.thread_time() - loop))

    def reset(self) -> None:
        self.wall = self.cpu = self.loop = 0.0
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory counts from here

    def report(self) -> dict[str, float]:
        memory = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        sizes = {key: int(memory[name].split()[0]) / 1024 for key, name in (("rss_mb", "VmRSS"), ("peak_mb", "VmHWM"))}
        return {"wall_ms": self.wall * 1000, "cpu_ms": self.cpu * 1000, "loop_ms": self.loop * 1000, **sizes}


if __name__ == "__main__":
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    uvloop.run(run_server())
