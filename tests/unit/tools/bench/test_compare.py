"""Turns of Headrace and its peers, and what is made of them."""

from __future__ import annotations

import asyncio
import os
import time

import msgspec

from headrace.tools.bench.compare import ComparisonReport, Turn, Work, ratios, render, take_turn, until
from headrace.tools.bench.stand import MODEL, Server, serve

ONE = Turn(100.0, 1600.0, 500.0, 0.0, 2.0, 9.0, 50, 0, 16.0, 0.1, 80.0)


def test_a_ratio_is_of_the_turns_of_one_round() -> None:
    ours = [ONE, msgspec.structs.replace(ONE, requests_s=400.0)]
    theirs = [msgspec.structs.replace(ONE, requests_s=50.0), ONE]
    found = ratios({"headrace": ours, "other": theirs})["other"]["requests_s"]
    assert (found.median, found.least, found.most) == (3.0, 2.0, 4.0)


def test_a_turn_without_an_answer_is_in_no_ratio() -> None:
    silent = msgspec.structs.replace(ONE, answered=0, failed=3, error="refused")
    turns = {"headrace": [ONE, ONE], "other": [silent, ONE]}
    assert ratios(turns)["other"]["cpu_us"].median == 1.0
    report = ComparisonReport(
        conditions={"cores": 2}, about={}, turns=turns, ratios=ratios(turns), missing={"third": "no wheel"}, loads=[1.0, 2.0]
    )
    told = render(report)
    assert "3 failed: refused" in told
    assert "third is missing: no wheel" in told
    assert "load of the machine at each round 1.0, 2.0" in told


def test_a_turn_ends_with_its_time_or_its_requests() -> None:
    asked = [b"a", b"b"]
    assert list(until(asked, time.perf_counter() + 60)) == asked
    assert list(until(asked, time.perf_counter())) == []


async def test_cpu_of_a_server_and_of_its_back_end_are_apart() -> None:
    async with await serve(0) as server:
        port = server.sockets[0].getsockname()[1]
        work = Work(streams=2, tokens=4, words=3, requests=200, seconds=30.0)
        turn = await asyncio.to_thread(take_turn, Server(port, (os.getpid(),), ()), work, 1)
    assert (turn.answered, turn.failed, turn.tokens_per_answer, turn.back_end_us) == (200, 0, 4.0, 0.0)
    assert turn.rss_mib > 1
    assert MODEL == "sim"
