"""A table is read once per interval however many tabs ask, and stays as it was while it cannot be read."""

from __future__ import annotations

import asyncio

from headrace.console.sections import Sections, Shared, Source
from headrace.jetstream.errors import RequestTimeout


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_many_tabs_cost_one_reading_per_interval() -> None:
    readings = 0

    async def read() -> dict[str, dict[str, int]]:
        nonlocal readings
        readings += 1
        await asyncio.sleep(0)
        return {"r": {"n": readings}}

    clock = Clock()
    sections = Sections({"t": Source(read, every_s=1.0)}, clock=clock)
    await asyncio.gather(*(sections.current("t") for _ in range(50)))
    assert readings == 1
    clock.now = 1.0
    assert (await sections.current("t")).rows == {"r": {"n": 2}}


async def test_a_table_that_cannot_be_read_keeps_its_rows_and_says_why() -> None:
    broken = False

    async def read() -> dict[str, dict[str, int]]:
        if broken:
            raise RequestTimeout("no answer from JetStream")
        return {"r": {"n": 1}}

    clock = Clock()
    sections = Sections({"t": Source(read)}, clock=clock)
    await sections.current("t")
    broken, clock.now = True, 1.0
    table = await sections.current("t")
    assert (table.rows, table.trouble) == ({"r": {"n": 1}}, "no answer from JetStream")
    broken, clock.now = False, 2.0
    assert (await sections.current("t")).trouble == ""


async def test_tables_of_one_reading_are_read_together() -> None:
    readings = 0

    async def read() -> dict[str, dict[str, dict[str, int]]]:
        nonlocal readings
        readings += 1
        return {"a": {"r": {"n": readings}}, "b": {"r": {"n": readings}}}

    clock = Clock()
    shared = Shared(read, clock=clock)
    sections = Sections({"a": shared.source("a"), "b": shared.source("b")}, clock=clock)
    assert (await sections.current("a")).rows == (await sections.current("b")).rows
    assert readings == 1
