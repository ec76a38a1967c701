from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.base.errors import CommandError
from headrace.broker.codec import encode
from headrace.broker.messages import Routed
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from headrace.planner.replay.recorded_requests import from_start, read_placements, read_trace
from headrace.planner.replay_command import span_s


async def test_first_placements_become_requests_at_their_arrival(connection: Connection, subjects: Subjects) -> None:
    def record(name: str, at: float, **kw: object) -> None:
        told = Routed(at=at, id=name, worker="w", tokens=100, **kw)  # type: ignore[arg-type]
        connection.send(subjects.route("m-1"), encode(told))

    record("old", 10.0)
    record("b", 1010.0, waited_s=2.0, uncached=40, max_tokens=7)
    record("a", 1005.0, waited_s=5.0, uncached=100)
    record("a", 1009.0, attempt=2)
    connection.send(subjects.route("m-1"), b"\xc1")
    async with asyncio.timeout(10):
        while (await connection.stream_state(subjects.stream("ROUTE"))).messages < 5:
            await asyncio.sleep(0.02)
    found = await read_placements(connection, subjects, since_s=1000.0, output=50)
    assert [(one.at, one.prompt, one.uncached, one.output) for one in found["m-1"]] == [(0.0, 100, 100, 50), (8.0, 100, 40, 7)]


def test_a_trace_is_read_and_what_is_none_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:05.9799600,31,0\n"
    )
    assert [(round(one.at, 3), one.prompt, one.output) for one in read_trace(path)] == [(0.0, 48, 10), (2.0, 31, 1)]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(CommandError):
        read_trace(path)
    with pytest.raises(CommandError):
        read_trace(tmp_path / "none")


def test_no_requests_are_no_requests() -> None:
    assert from_start([]) == []


def test_spans_are_read() -> None:
    assert [span_s(text) for text in ("90s", "30m", "12h", "7d", "1.5h")] == [90, 1800, 43200, 604800, 5400]
    for wrong in ("7", "d", "-1d", "7 d", "1w"):
        with pytest.raises(CommandError):
            span_s(wrong)
