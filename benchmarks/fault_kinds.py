"""The faults that `benchmarks.fault_pauses` injects into a running `headrace up`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.tools.chaos.client import post
from headrace.up.nats_part import ROOM_BYTES
from tests.support.machine_faults import Clock, delete, fill, garble, truncate

PROMPT_TOKENS = 40
SETTLED_S = 5.0  # a lease TTL and a second: what members learn only then is there
KILLS = 5
BETWEEN_KILLS_S = 2.0
HOUR_S = 3600.0
BETWEEN_JUMPS_S = 1.0
FULL_S = 6.0  # longer than any lease lives


@dataclass
class Running:
    """The deployment of one run, as its run file describes it."""

    folder: Path
    port: int
    rng: random.Random
    clock: Clock | None = None  # that all its processes read; None = the machine's

    def state(self) -> dict[str, Any]:
        """Return the run file."""
        found: dict[str, Any] = json.loads((self.folder / "run" / "up.json").read_text())
        return found

    def pid(self, kind: str, number: int = 0) -> int:
        """Return the process id of a part. Raises LookupError while it is being restarted."""
        state = self.state()
        part = state[kind][number] if isinstance(state[kind], list) else state[kind]
        if part["pid"] is None:
            raise LookupError(f"{kind} {number} is not running")
        return int(part["pid"])

    def kill(self, kind: str, number: int = 0) -> None:
        """Kill a part with SIGKILL."""
        os.kill(self.pid(kind, number), signal.SIGKILL)

    async def freeze(self, kind: str, seconds: float, number: int = 0) -> None:
        """Stop a part for some seconds."""
        pid = self.pid(kind, number)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)


async def _nothing(_: Running) -> None:
    await asyncio.sleep(0)


async def _worker_killed(run: Running) -> None:
    run.kill("workers")


async def _worker_frozen(run: Running) -> None:
    await run.freeze("workers", 3.0)


async def _two_workers_killed_4_s_apart(run: Running) -> None:
    run.kill("workers", 0)
    await asyncio.sleep(4.0)
    run.kill("workers", 1)


async def _two_workers_killed_at_once(run: Running) -> None:
    run.kill("workers", 0)
    await asyncio.sleep(0.05)
    run.kill("workers", 1)


async def _router_killed(run: Running) -> None:
    run.kill("routers")


async def _router_killed_then_worker(run: Running) -> None:
    run.kill("routers")
    await asyncio.sleep(1.5)
    run.kill("workers")


async def _frontend_frozen(run: Running) -> None:
    await run.freeze("frontend", 3.0)


async def _nats_killed(run: Running) -> None:
    run.kill("nats")


async def _nats_stopped(run: Running) -> None:
    await run.freeze("nats", 4.0)


async def _nats_and_worker_killed(run: Running) -> None:
    run.kill("nats")
    run.kill("workers")


async def _nats_and_router_killed(run: Running) -> None:
    run.kill("nats")
    run.kill("routers")


async def _nats_router_and_worker_killed(run: Running) -> None:
    for part in ("nats", "routers", "workers"):
        run.kill(part)


async def _killed_again_and_again(run: Running) -> None:
    """Kill one worker after the other, whichever runs."""
    for number in range(KILLS):
        await asyncio.sleep(BETWEEN_KILLS_S if number else 0.0)
        workers = [at for at, worker in enumerate(run.state()["workers"]) if worker["pid"] is not None]
        if workers:
            run.kill("workers", workers[number % len(workers)])


async def _damage(run: Running, damage: Callable[[Path], None]) -> None:
    """Damage the store of a nats-server that stands still and is then killed: `up` starts it again on what is left."""
    pid = run.pid("nats")
    os.kill(pid, signal.SIGSTOP)
    await asyncio.to_thread(damage, run.folder / "nats" / "store")
    os.kill(pid, signal.SIGKILL)


async def _store_truncated(run: Running) -> None:
    await _damage(run, truncate)


async def _store_garbled(run: Running) -> None:
    await _damage(run, garble)


async def _store_deleted(run: Running) -> None:
    await _damage(run, delete)


async def _clock_jumped(run: Running) -> None:
    """Set the clock an hour forward, and an hour back from the true time, and right again."""
    assert run.clock is not None
    for offset_s in (HOUR_S, -HOUR_S, 0.0):
        run.clock.jump_to(offset_s)
        await asyncio.sleep(BETWEEN_JUMPS_S)


async def _disk_filled(run: Running) -> None:
    ballast = run.folder / "ballast"
    await asyncio.to_thread(fill, ballast)
    await asyncio.sleep(FULL_S)
    ballast.unlink()


async def _poison(run: Running, count: int) -> None:
    """Send requests that crash each worker which runs them at their tenth token, and see them end."""
    prompts = [[run.rng.randint(200, 3000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    await asyncio.gather(*(_send_poison(run, prompt) for prompt in prompts))


async def _send_poison(run: Running, prompt: list[int]) -> None:
    body = {"model": "sim", "prompt": prompt, "max_tokens": 40, "stream": True, "ignore_eos": True}
    body["vllm_xargs"] = {"sim": {"crash_at_token": 10}}
    async with post("127.0.0.1", run.port, "/v1/completions", body, headers={"x-request-timeout-s": "120"}) as response:
        said = b"".join([data async for data in response.events()])
    if b"poison" not in said:
        print(f"    a poison request ended so: {said[-200:]!r}", flush=True)


async def _one_poison(run: Running) -> None:
    await _poison(run, 1)


async def _five_poisons(run: Running) -> None:
    await _poison(run, 5)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and how long after `/ready` it comes: an age in seconds of the processes that have to notice it."""

    title: str
    inject: Callable[[Running], Awaitable[None]]
    age_s: float = SETTLED_S
    engine: tuple[str, ...] = ()  # more arguments of the simulator
    jumps: bool = False  # its processes read a clock that the fault sets
    disk_bytes: int = 0  # its data folder is a file system of this size; 0 = on the machine's


FAULTS = {
    "none": Fault("none", _nothing),
    "worker-killed": Fault("worker killed", _worker_killed),
    "worker-killed-early": Fault("worker killed 1 s after the start", _worker_killed, age_s=1.0),
    "router-then-worker": Fault("router killed, a worker 1.5 s later", _router_killed_then_worker),
    "two-killed-apart": Fault("two workers killed, 4 s apart", _two_workers_killed_4_s_apart),
    "two-killed-at-once": Fault("two workers killed, 50 ms apart", _two_workers_killed_at_once),
    "worker-frozen": Fault("worker frozen for 3 s", _worker_frozen),
    "router-killed": Fault("router killed", _router_killed),
    "frontend-frozen": Fault("frontend frozen for 3 s", _frontend_frozen),
    "nats-killed": Fault("nats-server killed, started again at once", _nats_killed),
    "nats-stopped": Fault("nats-server stopped for 4 s", _nats_stopped),
    "nats-and-worker": Fault("nats-server and a worker killed together", _nats_and_worker_killed),
    "nats-and-router": Fault("nats-server and a router killed together", _nats_and_router_killed),
    "nats-router-worker": Fault("nats-server, a router and a worker killed together", _nats_router_and_worker_killed),
    "five-kills": Fault("five kills of workers, 2 s apart", _killed_again_and_again),
    "store-truncated": Fault("nats-server killed, its store cut in half", _store_truncated),
    "store-garbled": Fault("nats-server killed, its store garbled", _store_garbled),
    "store-deleted": Fault("nats-server killed, its store deleted", _store_deleted),
    "clock-jumped": Fault("the clock an hour forward, back, and right again", _clock_jumped, jumps=True),
    "disk-full": Fault("the disk full for 6 s", _disk_filled, disk_bytes=3 * ROOM_BYTES),
    "one-poison": Fault("a request that crashes its workers", _one_poison, engine=("allow_request_faults=true",)),
    "five-poisons": Fault("five requests that crash their workers", _five_poisons, engine=("allow_request_faults=true",)),
}
