"""Framing, headers and methods that keep to no rules: a clean 4xx or a closed connection, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from headrace.frontend.http.client_connection import MAX_HEADERS, MAX_URL
from tests.support.frontend.fakes import chat
from tests.support.rude_server import error, request, running, status


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,  # TLS to a plain port
        b"\0" * 100,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
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
        b"CONNECT x:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nhost: localhost\r\n\r\n",
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
        head = b"GET /live HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade, close\r\n\r\n"
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


async def test_too_many_headers_are_refused() -> None:
    async with running() as server:
        answer = await server.send(request(*[f"a{i}: b" for i in range(MAX_HEADERS)], method="GET", path="/live"))
        assert (status(answer), error(answer)["code"]) == (431, "headers_too_large")
        few = request(*[f"a{i}: b" for i in range(MAX_HEADERS - 3)], method="GET", path="/live")
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


@pytest.mark.parametrize("sent", [b"", b"GET /live HT", b"GET /live HTTP/1.1\r\nhost: localhost\r\n"])
@pytest.mark.slow
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


@pytest.mark.slow
async def test_the_rest_of_a_body_nobody_reads_may_not_come_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.frontend.http.connections.LINGER_S", 0.2)
    async with running() as server:
        reader, writer = await server.connect()
        writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")
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


async def test_head_is_answered_without_a_body() -> None:
    async with running() as server:
        answer = await server.send(request(method="HEAD", path="/live"))
        assert status(answer) == 200
        assert answer.endswith(b"\r\n\r\n")
        assert status(await server.send(request(method="HEAD", path="/v1/completions"))) == 405


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
        assert status(await server.send(preflight)) == 403
        refused = await server.send(called)
        assert status(refused) == 403
        assert b"access-control" not in refused
    async with running(cors_origins=("https://app.example",)) as server:
        answer = await server.send(preflight)
        assert status(answer) == 200
        assert b"access-control-allow-origin: https://app.example" in answer
        assert b"access-control-allow-origin: https://app.example" in await server.send(called)
        other = await server.send(called.replace(b"app.example", b"bad.example"))
        assert status(other) == 403
        assert b"access-control-allow-origin" not in other


async def test_how_late_the_event_loop_is_can_be_seen() -> None:
    async with running() as server:
        await asyncio.sleep(0.2)
        assert "headrace_frontend_loop_lag_seconds_count" in server.metrics.render().decode()


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"GET /live HTTP/1.1\r\nconnection: close\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\nconnection: close\r\n\r\n", 400),
        (b"GET /live\r\n\r\n", 400),
        (request("transfer-encoding: gzip, chunked", body=b"0\r\n\r\n"), 400),
        (b"GET /live HTTP/1.1\r\nhost: rebound.evil.example\r\nconnection: close\r\n\r\n", 403),
    ],
)
async def test_what_rfc_9112_forbids_and_a_foreign_name_get_no_answer(raw: bytes, code: int) -> None:
    async with running() as server:
        assert status(await server.send(raw)) in ((0, 400) if code == 400 else (code,))
        await server.alive()


async def test_the_host_of_an_absolute_target_counts_and_not_that_of_the_header() -> None:
    async with running() as server:
        foreign = b"GET http://rebound.evil.example/v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        assert status(await server.send(foreign)) == 403
        own = b"GET http://localhost:8000/v1/models HTTP/1.1\r\nhost: rebound.evil.example\r\nconnection: close\r\n\r\n"
        assert status(await server.send(own)) == 200
        assert status(await server.send(own.replace(b"host: rebound.evil.example\r\n", b""))) == 400
        await server.alive()


async def test_every_answer_tells_browsers_what_not_to_do_with_it() -> None:
    body = json.dumps(chat(stream=True)).encode()
    streamed = request(f"content-length: {len(body)}", body=body)
    async with running() as server:
        for asked in (request(method="GET", path="/v1/models"), streamed, request(method="GET", path="/no")):
            head = (await server.send(asked)).partition(b"\r\n\r\n")[0]
            for line in (
                b"x-content-type-options: nosniff",
                b"x-frame-options: DENY",
                b"referrer-policy: no-referrer",
                b"cross-origin-resource-policy: same-origin",
            ):
                assert line in head
