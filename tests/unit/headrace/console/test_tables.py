"""What a tab computes from changes is the state that they were made from."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from headrace.broker.keys import KeyRecord
from headrace.console import tables as live_tables
from headrace.console.guard import ConsoleGuard
from headrace.console.tables import LiveTables, Sections, Shared, Source, TooManyTabs, applied, changes
from headrace.frontend.errors import BadRequest
from headrace.jetstream.errors import RequestTimeout

ROWS = st.dictionaries(
    st.sampled_from("abcd"),
    st.dictionaries(st.sampled_from("xyz"), st.integers(0, 2) | st.text(max_size=2), min_size=1),
    max_size=4,
)


def without_nulls(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {key: {name: value for name, value in row.items() if value is not None} for key, row in rows.items()}


@given(ROWS, ROWS)
def test_a_tab_that_applies_the_changes_has_the_new_state(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert without_nulls(applied(old, changes(old, new))) == new


@given(ROWS)
def test_what_has_not_changed_is_not_sent(rows: dict[str, Any]) -> None:
    assert changes(rows, {key: dict(row) for key, row in rows.items()}) == {}


def test_only_the_columns_that_changed_are_sent() -> None:
    old = {"w1": {"state": "serving", "running": 3}, "w2": {"state": "serving", "running": 0}}
    new = {"w1": {"state": "serving", "running": 4}, "w3": {"state": "serving", "running": 0}}
    assert changes(old, new) == {"w1": {"running": 4}, "w2": None, "w3": {"state": "serving", "running": 0}}


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


async def no_keys() -> list[KeyRecord]:
    return []


class Scripted:
    """A table that has these states one after the other; an exception is one that cannot be read."""

    def __init__(self, *states: Any) -> None:
        self._states = list(states)

    async def read(self) -> Any:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        if isinstance(state, Exception):
            raise state
        return state


def tables(*states: Any) -> LiveTables:
    guard = ConsoleGuard(host="127.0.0.1", key="", private=False, stored=no_keys)
    return LiveTables(Sections({"t": Source(Scripted(*states).read, every_s=0.0)}), guard, interval_s=0.001)


def request(query: str) -> Request:
    return Request({"type": "http", "method": "GET", "path": "/", "query_string": query.encode(), "headers": []})


async def beats(live: LiveTables, count: int) -> list[Any]:
    response = await live.events(request("tables=t"))
    found: list[Any] = []
    async for piece in response.body_iterator:  # type: ignore[attr-defined]
        text = bytes(piece).decode()
        found.append(json.loads(text[6:]) if text.startswith("data: ") else text)
        if len(found) == count:
            live.close()
    return found


async def test_all_rows_come_first_and_then_only_what_changed() -> None:
    told = await beats(tables({"a": {"n": 1, "m": 0}}, {"a": {"n": 2, "m": 0}}, {"b": {"n": 1, "m": 0}}), 3)
    assert told == [
        {"t": {"all": {"a": {"n": 1, "m": 0}}}},
        {"t": {"changes": {"a": {"n": 2}}}},
        {"t": {"changes": {"a": None, "b": {"n": 1, "m": 0}}}},
    ]


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to whatever is next."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__()
        self._selector: Any
        select = self._selector.select

        def jump(timeout: float | None) -> Any:
            self._now_s += max(0.0, timeout or 0.0)
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self._now_s


def test_a_tab_gets_at_most_one_update_in_a_second_although_all_changes_all_the_time() -> None:
    async def watch() -> list[float]:
        loop = asyncio.get_running_loop()
        guard = ConsoleGuard(host="127.0.0.1", key="", private=False, stored=no_keys)
        states = [{"a": {"n": n}} for n in range(99)]
        live = LiveTables(Sections({"t": Source(Scripted(*states).read, every_s=0.0)}), guard)
        response = await live.events(request("tables=t"))
        at_s: list[float] = []
        async for _ in response.body_iterator:  # type: ignore[attr-defined]
            at_s.append(loop.time())
            if len(at_s) == 20:
                live.close()
        return at_s

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        at_s = runner.run(watch())
    assert min(later - earlier for earlier, later in pairwise(at_s)) >= 1.0 - 1e-6
    assert at_s[-1] < 20.0


async def test_while_nothing_changes_only_a_comment_comes_now_and_then() -> None:
    assert (await beats(tables({"a": {"n": 1}}), 2))[1] == ": nothing has changed\n\n"


async def test_a_tab_learns_that_a_table_is_not_current_and_when_it_is_again() -> None:
    rows = {"a": {"n": 1}}
    told = await beats(tables(rows, RequestTimeout("no answer"), rows), 3)
    assert [one.get("troubles") for one in told] == [None, {"t": "no answer"}, {}]


@pytest.mark.parametrize("query", ["", "tables=", "tables=t,secrets"])
async def test_a_table_that_is_not_there_is_named(query: str) -> None:
    with pytest.raises(BadRequest):
        await tables({}).events(request(query))


async def test_more_tabs_than_it_serves_are_refused_and_one_that_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_tables, "MOST_TABS", 1)
    live = tables({"a": {"n": 1}})
    first = (await live.events(request("tables=t"))).body_iterator  # type: ignore[attr-defined]
    await anext(first)
    with pytest.raises(TooManyTabs):
        await live.events(request("tables=t"))
    await first.aclose()
    await live.events(request("tables=t"))
