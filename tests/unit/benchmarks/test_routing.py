"""The routing benchmark's own arithmetic: every policy gets the same work, and what is counted is what was told."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from benchmarks.client import run_bodies
from benchmarks.routing import SIM

SMALL = replace(SIM, prefixes=3, prefix_words=20, tail_words=4, requests=12)


def families_of(bodies: list[bytes]) -> list[int]:
    """Which family each is of, numbered as they come."""
    seen: dict[str, int] = {}
    return [seen.setdefault(json.loads(body)["messages"][0]["content"], len(seen)) for body in bodies]


def test_turns_have_the_same_families_in_the_same_order_in_other_words() -> None:
    one, other = SMALL.bodies("kv 0", 7, "sim"), SMALL.bodies("round-robin 0", 7, "sim")
    assert families_of(one) == families_of(other)
    assert len(set(families_of(one))) == 3
    assert {json.loads(body)["messages"][0]["content"] for body in one}.isdisjoint(
        json.loads(body)["messages"][0]["content"] for body in other
    )
    assert families_of(one) != families_of(SMALL.bodies("kv 1", 8, "sim"))


@pytest.mark.parametrize("size", [7, 64, 4096])
async def test_usage_is_counted_however_the_bytes_are_cut(size: int) -> None:
    usage = {"prompt_tokens": 70, "completion_tokens": 1, "total_tokens": 71, "prompt_tokens_details": {"cached_tokens": 64}}
    events = [{"choices": [{"delta": {"content": "a"}}], "usage": None}, {"choices": [], "usage": usage}]
    text = "".join(f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events) + "data: [DONE]\n\n"
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + text.encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
            for at in range(0, len(answer), size):
                writer.write(answer[at : at + size])
                await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        outcome = await run_bodies("127.0.0.1", port, SMALL.bodies("x", 0, "sim")[:2], streams=1, timeout_s=10.0)
    assert (outcome.ok, outcome.reported, outcome.prompt_tokens, outcome.cached_tokens) == (2, 2, 140, 128)
