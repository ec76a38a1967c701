"""Runs a coroutine on a loop whose time is virtual: nothing waits, and a busy machine changes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM
from tests.simulation.virtual.world import World

LONGEST_S = 100.0


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` to its end. Raises what it raises."""
    ended = []

    async def process(_machine: Machine) -> None:
        await main()
        ended.append(True)

    with World(1, CALM) as world:
        world.process("P", process)
        world.run(LONGEST_S)
    assert ended, f"it did not end within {LONGEST_S} virtual seconds"
