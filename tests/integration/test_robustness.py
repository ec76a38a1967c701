"""A server on a real socket, and clients that keep to no rules: a clean 4xx or a closed connection, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from frontend.connections import MAX_HEADERS, MAX_URL
from frontend.server import listen, serve
from frontend.settings import FrontendSettings
from frontend.turns import Turns
from tests.unit.frontend.fakes import CARD, FILES, MODEL, FakeIngress, FakeServed, chat, frontend

PATH = "/v1/chat/completions"
TEXT = "the text that is replaced"


class Running:
    def __init__(self, ingress: FakeIngress, built: Any, port: int) -> None:
        self.ingress = ingress
        self.metrics = built.metrics
        self.port = port
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def send(self, raw: bytes) -> bytes:
        """Everything the server says until it closes the connection."""
        reader, writer = await self.connect()
        answer = b""
        with contextlib.suppress(ConnectionError):
            writer.write(raw)
            await writer.drain()
            async with asyncio.timeout(10):
                while part := await reader.read(65536):
                    answer += part
        writer.close()
        return answer

    async def alive(self) -> None:
        """It answers others as ever."""
        answer = await self.send(post(chat()))
        assert answer.startswith(b"HTTP/1.1 200"), answer


@contextlib.asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Running]:
    wishes = FrontendSettings(port=0, drain_grace_s=0, access_log=False, **settings)
    ingress = FakeIngress()
    built = frontend(ingress, access_log=False, **settings)
    listener = listen(wishes)
    listening = asyncio.Event()

    async def drain(grace_s: float) -> None:
        pass

    task = asyncio.create_task(serve(built, wishes, listener, drain=drain, on_listening=lambda url: listening.set()))
    try:
        await asyncio.wait_for(listening.wait(), 5)
        server = Running(ingress, built, listener.getsockname()[1])
        try:
            yield server
        finally:
            for writer in server.writers:
                writer.transport.abort()
    finally:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
        await asyncio.wait_for(task, 10)
        listener.close()


def request(*headers: str, method: str = "POST", path: str = PATH, body: bytes = b"") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", "connection: close", *headers]).encode() + b"\r\n\r\n" + body


def post(document: Any) -> bytes:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return request(f"content-length: {len(body)}", body=body)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def error(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


# -- bodies --------------------------------------------------------------------------------------------------


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


# -- framing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,  # TLS to a plain port
        b"\0" * 100,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\na: b\0c\r\n\r\n",
        b"GET / HTTP/1.1\r\n: b\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\n\r\n",
        request("content-length: x"),
        request("content-length: -5"),
        request("content-length: 5", "content-length: 6"),
        request("content-length: 99999999999999999999999999"),
        request("content-length: 5", "transfer-encoding: chunked", body=b"0\r\n\r\n"),
        request("transfer-encoding: chunked, identity", body=b"5\r\n"),
        request("transfer-encoding: chunked", body=b"zz\r\n"),
        request("transfer-encoding: chunked", body=b"-5\r\n"),
        request("transfer-encoding: chunked", body=b"fffffffffffffffffff\r\n"),
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_a_400_or_a_closed_connection(raw: bytes) -> None:
    async with running() as server:
        assert status(await server.send(raw)) in (0, 400, 404, 405)
        await server.alive()


@pytest.mark.parametrize("shorter", [True, False])
async def test_a_wrong_content_length_is_noticed(shorter: bool) -> None:
    body = json.dumps(chat()).encode()
    async with running(body_timeout_s=0.3) as server:
        answer = await server.send(request(f"content-length: {len(body) + (-5 if shorter else 5)}", body=body))
        assert status(answer) == (400 if shorter else 408)
        await server.alive()


async def test_an_upgrade_is_not_taken() -> None:
    async with running() as server:
        head = b"GET /live HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade, close\r\n\r\n"
        reader, writer = await server.connect()
        writer.write(head)
        assert status(await asyncio.wait_for(reader.read(1000), 5)) in (200, 400)
        writer.close()
        await server.alive()


async def test_chunks_of_one_byte_are_put_together() -> None:
    body = json.dumps(chat()).encode()
    chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    async with running() as server:
        assert status(await server.send(request("transfer-encoding: chunked", body=chunked))) == 200


# -- headers -------------------------------------------------------------------------------------------------


async def test_too_many_headers_are_refused() -> None:
    async with running() as server:
        answer = await server.send(request(*[f"a{i}: b" for i in range(MAX_HEADERS)], method="GET", path="/live"))
        assert (status(answer), error(answer)["code"]) == (431, "headers_too_large")
        few = request(*[f"a{i}: b" for i in range(MAX_HEADERS - 2)], method="GET", path="/live")
        assert status(await server.send(few)) == 200


@pytest.mark.parametrize("complete", [True, False])
async def test_headers_that_are_too_large_are_refused(complete: bool) -> None:
    async with running(max_header_bytes=10_000) as server:
        raw = request("a: " + "b" * 20_000, method="GET", path="/live")
        answer = await server.send(raw if complete else raw[:-4])
        assert (status(answer), error(answer)["code"]) == (431, "headers_too_large")


async def test_a_flood_of_header_bytes_is_not_kept() -> None:
    async with running(max_header_bytes=10_000) as server:
        _, writer = await server.connect()
        writer.write(b"GET /live HTTP/1.1\r\na: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                while sent < 64 << 20:
                    writer.write(b"b" * 65536)
                    sent += 65536
                    await writer.drain()
        assert sent < 64 << 20
        writer.close()
        await server.alive()


async def test_a_url_that_is_too_long_is_refused() -> None:
    async with running() as server:
        answer = await server.send(request(method="GET", path="/live?" + "a" * MAX_URL))
        assert (status(answer), error(answer)["code"]) == (414, "url_too_long")
        answer = await server.send(b"GET /live?" + b"a" * MAX_URL)  # and nobody waits for its end
        assert (status(answer), error(answer)["code"]) == (414, "url_too_long")
        assert status(await server.send(request(method="GET", path="/live?" + "a" * 8000))) == 200


@pytest.mark.parametrize("sent", [b"", b"GET /live HT", b"GET /live HTTP/1.1\r\nhost: x\r\n"])
async def test_headers_that_drip_in_are_given_up(sent: bytes) -> None:
    async with running(header_timeout_s=0.2) as server:
        reader, writer = await server.connect()
        writer.write(sent)
        drip = b"a" if sent.endswith(b"HT") or not sent else b"a: b\r\n"
        answer = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(8):
                while True:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            if not (part := await reader.read(1000)):
                                break
                            answer += part
                            continue
                    if sent:
                        writer.write(drip)
        assert status(answer) in (0, 400, 408)
        writer.close()
        await server.alive()


async def test_the_rest_of_a_body_nobody_reads_may_not_come_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.connections.LINGER_S", 0.2)
    async with running() as server:
        reader, writer = await server.connect()
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        assert status(await reader.read(1000)) == 200
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(8):
                while not reader.at_eof():
                    writer.write(b" ")
                    await asyncio.sleep(0.02)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.001):
                            await reader.read(1)
        writer.close()
        await server.alive()


# -- connections ---------------------------------------------------------------------------------------------


async def test_what_has_to_wait_for_its_turn_is_heard_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a crowd used up every turn: requests, their bodies and the ends of connections all come through the line."""
    monkeypatch.setattr("frontend.turns.Turns.is_late", always_late)
    async with running() as server:
        body = json.dumps(chat()).encode()
        raw = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 2 + post(chat())[: -len(body)]
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


def always_late(turns: Turns) -> bool:
    turns._loop.call_soon(turns._next)
    return True


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async with running() as server:
        raw = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 3 + request(method="GET", path="/nothing")
        answer = await server.send(raw)
        assert [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 200, 200, 404]


async def test_a_flood_of_pipelined_requests_is_cut_off() -> None:
    async with running(max_pipelined=4) as server:
        await server.send(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000)
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


# -- methods -------------------------------------------------------------------------------------------------


async def test_head_is_answered_without_a_body() -> None:
    async with running() as server:
        answer = await server.send(request(method="HEAD", path="/live"))
        assert status(answer) == 200
        assert answer.endswith(b"\r\n\r\n")
        assert status(await server.send(request(method="HEAD"))) == 405


async def test_browsers_may_call_only_where_that_is_set() -> None:
    preflight = request(
        "origin: https://app.example",
        "access-control-request-method: POST",
        "access-control-request-headers: authorization,content-type",
        method="OPTIONS",
    )
    body = json.dumps(chat()).encode()
    called = request("origin: https://app.example", f"content-length: {len(body)}", body=body)
    async with running() as server:
        assert status(await server.send(preflight)) == 405
        assert b"access-control" not in await server.send(called)
    async with running(cors_origins=("https://app.example",)) as server:
        answer = await server.send(preflight)
        assert status(answer) == 200
        assert b"access-control-allow-origin: https://app.example" in answer
        assert b"access-control-allow-origin: https://app.example" in await server.send(called)
        other = await server.send(called.replace(b"app.example", b"bad.example"))
        assert b"access-control-allow-origin" not in other


async def test_how_late_the_event_loop_is_can_be_seen() -> None:
    async with running() as server:
        await asyncio.sleep(0.2)
        assert "headrace_frontend_loop_lag_seconds_count" in server.metrics.render().decode()
