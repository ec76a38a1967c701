"""Bodies that keep to no rules: a clean 4xx or a closed connection, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.support.frontend.fakes import CARD, FILES, MODEL, FakeServed, chat
from tests.support.rude_server import TEXT, Running, error, post, request, running, status


def with_content(raw: bytes) -> bytes:
    return b'{"model":"%s","messages":[{"role":"user","content":%s}]}' % (MODEL.encode(), raw)


BODIES: dict[str, tuple[Any, str | None]] = {
    "nothing": (b"", "malformed_json"),
    "not JSON": (b"hello", "malformed_json"),
    "cut off": (json.dumps(chat()).encode()[:-5], "malformed_json"),
    "more than one": (json.dumps(chat()).encode() * 2, "malformed_json"),
    "a list": (b"[1]", "invalid_parameter"),
    "null": (b"null", "invalid_parameter"),
    "100000 levels of lists": (b"[" * 100_000, "malformed_json"),
    "100000 levels of objects": (b'{"a":' * 100_000, "malformed_json"),
    "levels in a field that is ignored": (b'{"zz":' + b"[" * 70 + b"]" * 70 + b"}", "malformed_json"),
    "levels hidden by brackets in texts": (b'{"zz":' + b'["]",' * 70, "malformed_json"),
    "a million objects": (b'{"zz":[' + b",".join([b"{}"] * 1_000_000) + b"]}", "malformed_json"),
    "a million members": (lambda: b"{" + b",".join(b'"k%d":1' % i for i in range(1_000_000)) + b"}", "malformed_json"),
    "two million numbers": (b'{"zz":[' + b",".join([b"1"] * 2_000_000) + b"]}", "malformed_json"),
    "a lone high surrogate": (with_content(b'"\\ud800"'), "malformed_json"),
    "a lone low surrogate": (with_content(b'"\\udc00"'), "malformed_json"),
    "surrogates in UTF-8": (with_content(b'"\xed\xa0\x80"'), "malformed_json"),
    "invalid UTF-8": (with_content(b'"\xff\xfe"'), "malformed_json"),
    "cut UTF-8": (with_content(b'"\xe2\x82"'), "malformed_json"),
    "UTF-16": (json.dumps(chat()).encode("utf-16"), "malformed_json"),
    "a control character": (with_content(b'"a\x00b"'), None),
    "a number of 10000 digits": (b'{"model":"m","messages":[],"seed":' + b"9" * 10_000 + b"}", "invalid_parameter"),
    "a number out of range": (b'{"model":"m","messages":[],"temperature":1e999}', "invalid_parameter"),
    "a number out of range in a field that is ignored": (b'{"zz":1e999}', "missing_required_parameter"),
    "NaN": (b'{"temperature":NaN}', "malformed_json"),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_that_cannot_be_understood_is_a_400(name: str) -> None:
    body, code = BODIES[name]
    body = body() if callable(body) else body
    async with running() as server:
        answer = await server.send(post(body))
        if code is None:
            assert status(answer) in (200, 400)
        else:
            assert (status(answer), error(answer)["code"]) == (400, code), answer[:500]
        await server.alive()


async def test_nul_characters_are_text_like_any_other() -> None:
    async with running() as server:
        assert status(await server.send(post(with_content(b'"a\\u0000b"')))) == 200


async def test_a_prompt_of_a_million_ids_is_told_to_be_too_long() -> None:
    body = json.dumps({"model": MODEL, "prompt": [5] * 1_000_000}).encode()
    async with running() as server:
        answer = await server.send(request(f"content-length: {len(body)}", path="/v1/completions", body=body))
        assert (status(answer), error(answer)["code"]) == (400, "context_length_exceeded")


async def test_a_prompt_of_a_million_words_is_told_to_be_too_long() -> None:
    async with running() as server:
        answer = await server.send(post(with_content(b'"' + b"word " * 1_000_000 + b'"')))
        assert (status(answer), error(answer)["code"]) == (400, "context_length_exceeded")


async def test_a_body_over_the_limit_is_refused_without_being_read() -> None:
    async with running(max_body_bytes=1000) as server:
        answer = await server.send(request("content-length: 5000000000"))
        assert (status(answer), error(answer)["code"]) == (413, "body_too_large")
        chunked = b"3e8\r\n" + b"x" * 1000 + b"\r\n" + b"1\r\nx\r\n0\r\n\r\n"
        assert status(await server.send(request("transfer-encoding: chunked", body=chunked))) == 413
        await server.alive()


async def test_a_body_that_drips_in_is_given_up() -> None:
    async with running(body_timeout_s=0.2) as server:
        reader, writer = await server.connect()
        writer.write(request("content-length: 1000"))
        async with asyncio.timeout(5):
            while not (head := await reader.read(1000)):
                writer.write(b" ")
                await asyncio.sleep(0.01)
        assert status(head) == 408
        writer.close()


ROUTES = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]},
    "/v1/completions": {"model": MODEL, "prompt": TEXT},
    "/v1/responses": {"model": MODEL, "input": TEXT},
    "/v1/responses/input_tokens": {"model": MODEL, "input": TEXT},
    "/v1/messages": {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": TEXT}]},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]},
    "/v1/embeddings": {"model": MODEL, "input": TEXT},
    "/v1/score": {"model": MODEL, "text_1": TEXT, "text_2": "x"},
    "/v1/rerank": {"model": MODEL, "query": "x", "documents": [TEXT]},
    "/v1/classify": {"model": MODEL, "input": TEXT},
    "/tokenize": {"model": MODEL, "prompt": TEXT},
}


@contextlib.asynccontextmanager
async def serving_everything(**settings: Any) -> AsyncIterator[Running]:
    """A server whose one model can be asked for everything."""
    async with running(**settings) as server:
        kinds = ["chat", "completion", "embedding", "score", "classify"]
        server.ingress.models.served[MODEL] = FakeServed(msgspec.structs.replace(CARD, kinds=kinds), FILES)
        yield server


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.slow
async def test_every_route_has_a_clean_answer_to_every_kind_of_bad_body(path: str) -> None:
    whole, place = json.dumps(ROUTES[path]).encode(), json.dumps(TEXT).encode()
    assert place in whole
    bad = {
        "deep": whole.replace(place, b"[" * 100_000),
        "huge": whole.replace(place, b"[" + b"{}," * 150_000),
        "a million words": whole.replace(place, b'"' + b"word " * 1_000_000 + b'"'),
        "a number": whole.replace(place, b"5"),
        "an object": whole.replace(place, b'{"a":1}'),
        "a surrogate": whole.replace(place, b'"\\ud800"'),
        "invalid UTF-8": whole.replace(place, b'"\xff"'),
        "a bare NUL": whole.replace(place, b'"\x00"'),
        "cut off": whole[:-3],
        "a list": b"[1]",
    }
    async with serving_everything() as server:
        for name, raw in bad.items():
            answer = await server.send(request(f"content-length: {len(raw)}", path=path, body=raw))
            assert status(answer) == 400, (name, answer[:300])
            assert error(answer)["message"], name
        assert not server.ingress.jobs
        await server.alive()


@pytest.mark.parametrize("path", [path for path in ROUTES if "count" in path or "token" in path])
async def test_a_nul_that_is_written_as_it_should_be_is_counted(path: str) -> None:
    raw = json.dumps(ROUTES[path]).replace(json.dumps(TEXT), '"a\\u0000b"').encode()
    async with serving_everything() as server:
        assert status(await server.send(request(f"content-length: {len(raw)}", path=path, body=raw))) == 200


async def test_bodies_that_drip_in_are_given_up_on_every_route() -> None:
    async with serving_everything(body_timeout_s=0.2) as server:

        async def drip(path: str) -> int:
            reader, writer = await server.connect()
            writer.write(request("content-length: 1000", path=path))
            async with asyncio.timeout(8):
                while not (head := await _soon(reader)):
                    writer.write(b" ")
            return status(head)

        assert await asyncio.gather(*map(drip, ROUTES)) == [408] * len(ROUTES)
        await server.alive()


async def _soon(reader: asyncio.StreamReader) -> bytes:
    """What came within a moment."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.02):
            return await reader.read(1000)
    return b""


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_slow_bodies_of_many_connections_take_no_more_memory_than_they_are_given() -> None:
    """24 bodies of 8 MiB, each without its last byte, would hold 192 MiB; the budget is 32 MiB."""
    size, piece = 8 * 1024 * 1024, b"x" * (1 << 18)
    async with running(body_memory_bytes=32 * 1024 * 1024) as server:
        await server.alive()
        before = resident_bytes()
        answers: list[asyncio.Task[bytes]] = []
        for _ in range(24):
            reader, writer = await server.connect()
            writer.write(request(f"content-length: {size + 1}"))
            answers.append(asyncio.create_task(reader.read(4096)))
            with contextlib.suppress(ConnectionError):
                for _ in range(size // len(piece)):
                    writer.write(piece)
                    await asyncio.wait_for(writer.drain(), 10)
        await asyncio.wait(answers, timeout=1.0)
        assert resident_bytes() - before < 120 * 1024 * 1024
        await server.alive()
        refused = [answer.result() for answer in answers if answer.done() and answer.exception() is None and answer.result()]
        assert len(refused) >= 20
        assert {status(answer) for answer in refused} == {503}
        assert error(refused[0])["code"] == "too_many_bodies"
        assert b"retry-after: 1" in refused[0].lower()
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        for writer in server.writers:
            writer.transport.abort()
        async with asyncio.timeout(5):
            while server.metrics.arriving_bytes._value.get():
                await asyncio.sleep(0.01)
        await server.alive()
