"""Clients that hold connections or flood them: others are served, and nothing is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from headrace.frontend.http.loop import LoopBudget
from tests.support.frontend.fakes import chat, say
from tests.support.rude_server import error, post, request, running, status


async def test_what_has_to_wait_for_its_turn_is_heard_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a crowd used up every turn: requests, their bodies and the ends of connections all come through the line."""
    monkeypatch.setattr("headrace.frontend.http.loop.LoopBudget.is_spent", always_spent)
    async with running() as server:
        body = json.dumps(chat()).encode()
        raw = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2 + post(chat())[: -len(body)]
        reader, writer = await server.connect()
        writer.write(raw)
        for at in range(0, len(body), 20):
            await asyncio.sleep(0)
            writer.write(body[at : at + 20])
        async with asyncio.timeout(5):
            answer = await reader.read()
        assert [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 200, 200]
        writer.close()

        server.ingress.script = lambda job: []
        _, writer = await server.connect()
        writer.write(post(chat()))
        async with asyncio.timeout(5):
            while len(server.ingress.answers) < 2:
                await asyncio.sleep(0.01)
            writer.transport.abort()
            while not server.ingress.answers[-1].cancelled:
                await asyncio.sleep(0.01)


def always_spent(budget: LoopBudget) -> bool:
    budget._loop.call_soon(budget._next)
    return True


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async with running() as server:
        raw = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 3 + request(method="GET", path="/nothing")
        answer = await server.send(raw)
        assert [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 200, 200, 404]


async def test_pipelined_streams_come_one_after_the_other_each_whole() -> None:
    async with running() as server:
        server.ingress.script = lambda job: say(*(f"{job.choices}:{n} " for n in range(20)))(job)
        closing = post(chat(stream=True, n=3))
        staying = closing.replace(b"connection: close\r\n", b"")
        raw = b"".join(staying.replace(b'"n": 3', b'"n": %d' % n) for n in (1, 2)) + closing
        answer = await server.send(raw)
        answers = answer.split(b"HTTP/1.1 200 OK\r\n")[1:]
        for n, one in enumerate(answers, start=1):
            assert one.count(b"\r\n\r\n") == 2  # the head's end and the last chunk's
            assert one.count(f'"content":"{n}:'.encode()) == 20 * n
            assert one.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert len(answers) == 3


async def test_a_stream_has_the_same_headers_however_its_head_was_written() -> None:
    async with running() as server:
        closing = post(chat(stream=True))
        staying = closing.replace(b"connection: close\r\n", b"") + request(method="GET", path="/live")
        heads = []
        for raw in (closing, staying):
            head = (await server.send(raw)).split(b"\r\n\r\n")[0].split(b"\r\n")
            heads.append({line.split(b": ")[0] for line in head})
        assert heads[0] - heads[1] == {b"connection"}
        assert heads[1] < heads[0]


async def test_a_flood_of_pipelined_requests_is_cut_off() -> None:
    async with running(max_pipelined=4) as server:
        await server.send(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20_000)
        assert "too_many_connections" in server.metrics.render().decode()
        await server.alive()


async def test_at_the_limit_idle_connections_give_way_to_new_ones() -> None:
    async with running(max_connections=20) as server:
        idle = [await server.connect() for _ in range(60)]
        await server.alive()
        async with asyncio.timeout(5):
            closed = 0
            for reader, _ in idle[:40]:
                with contextlib.suppress(ConnectionError):
                    closed += not await reader.read(1000)
        for _, writer in idle:
            writer.close()


async def test_without_idle_connections_new_ones_are_refused() -> None:
    async with running(max_connections=16) as server:
        server.ingress.script = lambda job: []
        busy = [await server.connect() for _ in range(16)]
        for _, writer in busy:
            writer.write(post(chat()))
        async with asyncio.timeout(5):
            while len(server.ingress.answers) < 16:
                await asyncio.sleep(0.01)
        answer = await server.send(b"")
        assert (status(answer), error(answer)["code"]) == (503, "too_many_connections")
        assert b"retry-after" in answer
        for _, writer in busy:
            writer.close()
        async with asyncio.timeout(5):
            while not all(answer.cancelled for answer in server.ingress.answers):
                await asyncio.sleep(0.01)


async def test_at_the_limit_half_heads_give_way_to_new_connections() -> None:
    async with running(max_connections=16) as server:
        half = [await server.connect() for _ in range(16)]
        for _, writer in half:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: loc")
        await asyncio.sleep(0.1)
        for _ in range(20):
            await server.alive()
