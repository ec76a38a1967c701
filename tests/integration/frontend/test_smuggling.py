"""Requests that two readers read in different ways: refused with the connection, or answered as often as they are asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re

import pytest

from tests.support.frontend.fakes import chat
from tests.support.rude_server import Running, request, running, status
from tests.support.smuggling_vectors import BODY, FAMILIES, Vector, chunked, head

NEXT = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
ANSWER = re.compile(rb"HTTP/1\.1 (\d{3}) ")
MANY = 20  # connections at a time
FEWER = 8  # byte by byte, one of so many is sent: they differ in a byte, and the parser has to go on after each


async def whole(vector: Vector, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(vector.raw + NEXT)
    return b""


async def paused(vector: Vector, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The body comes when the head has been read, and where the server answers before the body, behind that answer."""
    start, end, rest = vector.raw.partition(b"\r\n\r\n")
    writer.write(start + end)
    seen = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            seen = await reader.read(65536)
    writer.write(rest)
    await writer.drain()
    await asyncio.sleep(0.01)
    writer.write(NEXT)
    return seen


async def in_bytes(vector: Vector, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    for byte in vector.raw + NEXT:
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    return b""


WAYS = {"whole": whole, "paused": paused, "in bytes": in_bytes}


async def answers(server: Running, vector: Vector, way: str) -> tuple[int, ...]:
    """The statuses of everything that is answered on one connection, until the server closes it."""
    reader, writer = await server.connect()
    seen = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(20):
            seen = await WAYS[way](vector, reader, writer)
            while part := await reader.read(65536):
                seen += part
    writer.transport.abort()
    return tuple(int(code) for code in ANSWER.findall(seen) if code != b"100")


def fits(vector: Vector, seen: tuple[int, ...]) -> bool:
    if vector.kept:
        return seen == (*vector.statuses, 200)
    return seen == vector.statuses[: len(seen)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_nothing_is_smuggled_past_a_request(family: str, way: str) -> None:
    wrong: dict[str, tuple[int, ...]] = {}
    gate = asyncio.Semaphore(MANY)
    vectors = FAMILIES[family]
    if way == "in bytes" and len(vectors) > 10 * FEWER:
        vectors = vectors[::FEWER]
    async with running(body_timeout_s=5) as server:

        async def attempt(vector: Vector) -> None:
            async with gate:
                seen = await answers(server, vector, way)
            if not fits(vector, seen):
                wrong[vector.name] = seen

        async with asyncio.TaskGroup() as group:
            for vector in vectors:
                group.create_task(attempt(vector))
        assert not wrong
        asked = sum(vector.statuses.count(200) for vector in vectors if BODY in vector.raw or b"1\r\n{" in vector.raw)
        assert len(server.ingress.jobs) <= asked, "a request ran that was not sent"
        await server.alive()


@pytest.mark.parametrize("name", ["x-headrace-tenant", "x-request-id"])
async def test_a_trailer_is_no_header(name: str) -> None:
    """A proxy that checks or replaces headers passes trailers on as they are."""
    body = json.dumps(chat()).encode()
    raw = head(b"transfer-encoding: chunked", b"connection: close") + chunked(body)[:-2] + name.encode() + b": evil\r\n\r\n"
    async with running() as server:
        answer = await server.send(raw)
        assert status(answer) == 200
        assert b"evil" not in answer
        assert server.ingress.jobs[0].tenant == "_"


@pytest.mark.parametrize("flood", ["a trailer", "trailers", "an extension of a chunk"])
async def test_what_is_no_content_of_a_body_is_bounded(flood: str) -> None:
    """Neither the limit of a body nor that of a head counts it, and the parser keeps a header whole until its end."""
    async with running(max_header_bytes=10_000) as server:
        _, writer = await server.connect()
        writer.write(head(b"transfer-encoding: chunked") + (b"1;a=" if "extension" in flood else b"1\r\n{\r\n0\r\na: "))
        sent = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                while sent < 64 << 20:
                    writer.write(b"b: c\r\n" * 10_000 if flood == "trailers" else b"b" * 60_000)
                    sent += 60_000
                    await writer.drain()
        assert sent < 64 << 20
        writer.close()
        await server.alive()


async def test_a_client_that_offers_another_protocol_is_answered_in_this_one() -> None:
    """As each request of the JDK's client does. Its body may come later than its head."""
    body = json.dumps(chat(stream=True)).encode()
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA")
    raw = request(*offer, f"content-length: {len(body)}", body=body).replace(b"connection: close\r\n", b"")
    async with running() as server:
        reader, writer = await server.connect()
        for _ in range(3):
            writer.write(raw[: -len(body) + 5])
            await asyncio.sleep(0.01)
            writer.write(raw[-len(body) + 5 :])
            async with asyncio.timeout(5):
                assert b"[DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n")
        assert len(server.ingress.jobs) == 3
        writer.close()
