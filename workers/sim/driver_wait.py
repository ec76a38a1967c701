"""How the engine's driver waits: for time to pass, for work, and for what other engines send or move meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.workers.sim.scheduler import Scheduler
from headrace.workers.sim.transfer.kv_transfer import SimKvTransfer


async def pass_time(exchange: SimKvTransfer, until: float, clock: Callable[[], float]) -> None:
    """Give way to the loop, and let the time of a step pass. Other engines are listened to meanwhile."""
    while True:
        look = exchange.poll_at()
        if look is None and not until:  # as after every step without modelled delay
            await asyncio.sleep(0)
            return
        await asyncio.sleep(max(0.0, (until if look is None else min(until, look)) - clock()))
        if look is not None:
            exchange.poll()
        if clock() >= until:
            return


async def until_work(scheduler: Scheduler, work: asyncio.Event) -> None:
    """Wait for something new from outside, or for the time at which something is due."""
    loop, exchange = asyncio.get_running_loop(), scheduler.exchange
    due = scheduler.next_at()
    while not work.is_set():
        look, now = exchange.poll_at(), loop.time()
        if due is not None and due <= now:
            return
        if look is not None and look <= now:  # blocks move, and that takes us
            await asyncio.sleep(0)
            if exchange.poll():
                return
            continue
        times = [at for at in (due, look) if at is not None]
        timer = loop.call_at(min(times), work.set) if times else None
        await work.wait()
        if timer is not None:
            timer.cancel()
