"""Waits of the step driver: for time to pass, for work, and for notices and blocks from other engines meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.workers.sim.scheduler import SimScheduler
from headrace.workers.sim.transfer.kv_transfer import SimKvTransfer


async def pass_time(exchange: SimKvTransfer, until: float, clock: Callable[[], float]) -> None:
    """Yield to the event loop and wait out the time of a step. The fabric is polled meanwhile."""
    while True:
        look = exchange.poll_at()
        if look is None and not until:  # the case after every step without modelled delay
            await asyncio.sleep(0)
            return
        await asyncio.sleep(max(0.0, (until if look is None else min(until, look)) - clock()))
        if look is not None:
            exchange.poll()
        if clock() >= until:
            return


async def until_work(scheduler: SimScheduler, work: asyncio.Event) -> None:
    """Wait for a request from outside, or for the time at which the scheduler has something due."""
    loop, exchange = asyncio.get_running_loop(), scheduler.exchange
    due = scheduler.next_at()
    while not work.is_set():
        look, now = exchange.poll_at(), loop.time()
        if due is not None and due <= now:
            return
        if look is not None and look <= now:  # blocks move, and polling helps them on
            await asyncio.sleep(0)
            if exchange.poll():
                return
            continue
        times = [at for at in (due, look) if at is not None]
        timer = loop.call_at(min(times), work.set) if times else None
        await work.wait()
        if timer is not None:
            timer.cancel()
