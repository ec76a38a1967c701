"""The drain of a frontend: a carrier gives its jobs back before the ingress gives up the lease that it speaks under."""

from __future__ import annotations

import asyncio

from headrace.frontend.server import hand_back
from headrace.frontend.serving import Parts


class Part:
    """A part that takes its whole grace period."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name = name
        self.done = done
        self.grace_s = -1.0

    async def run(self) -> None:
        await asyncio.Future()

    async def drain(self, grace_s: float) -> None:
        self.grace_s = grace_s
        await asyncio.sleep(grace_s / 10)
        self.done.append(self.name)


async def test_parts_drain_at_once_while_they_run_and_the_carrier_before_the_ingress() -> None:
    done: list[str] = []
    ingress, batches, carrier = Part("ingress", done), Part("batches", done), Part("carrier", done)
    async with asyncio.TaskGroup() as group:
        parts = Parts(group)
        parts.start("ingress", ingress.run, ingress.drain)
        parts.start("batches", batches.run, batches.drain)
        parts.start("carrier", carrier.run, lambda grace_s: hand_back(carrier.drain, grace_s))
        async with asyncio.timeout(0.25):  # one after the other would take 0.25 s
            await parts.drain(1.0)
        parts.stop()
    assert done[0] == "carrier"
    assert (ingress.grace_s, batches.grace_s) == (1.0, 1.0)
