"""Requests go to the address that was given, end where they are bounded, and tell what was not sent from what has no answer."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from headrace.base.http_client import BadAnswer, BodyTooLong, NoConnection, ask
from tests.support.certificates import write_certificate

Play = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(play: Play | bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Answer each request by a function of its bytes, or with these bytes; then close."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        sent = head + await reader.readexactly(length)
        with suppress(OSError):
            if isinstance(play, bytes):
                writer.write(play)
            else:
                await play(sent, writer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


def whole(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers, b"", body])


async def test_a_request_goes_to_the_given_address_under_its_own_name() -> None:
    got: list[bytes] = []

    async def play(sent: bytes, writer: asyncio.StreamWriter) -> None:
        got.append(sent)
        writer.write(whole(b"yes", b"X-A: b"))

    async with server(play) as port:
        url = f"http://nowhere.invalid:{port}/a/b?c=d"
        async with ask("POST", url, headers={"X-Key": "k"}, body=b"{}", address="127.0.0.1") as answer:
            assert (answer.status, answer.headers["x-a"], await answer.body(10)) == (200, "b", b"yes")
    head, _, body = got[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /a/b?c=d HTTP/1.1\r\n")
    assert {b"Host: nowhere.invalid:%d" % port, b"X-Key: k", b"Content-Length: 2"} <= set(head.split(b"\r\n"))
    assert body == b"{}"


async def test_the_certificate_must_be_that_of_the_name_and_not_of_the_address(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with server(whole(b"yes"), served) as port:
        async with ask("GET", f"https://localhost:{port}/", tls=trusting, address="127.0.0.1") as answer:
            assert await answer.body(10) == b"yes"
        with pytest.raises(NoConnection) as failed:
            async with ask("GET", f"https://other.example:{port}/", tls=trusting, address="127.0.0.1"):
                pass
        assert isinstance(failed.value.__cause__, ssl.SSLError)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with server(whole(b"yes")) as port, ask("GET", f"http://127.0.0.1:{port}/") as answer:
        assert await answer.body(10) == b"yes"


@pytest.mark.parametrize("raw", [whole(b"x" * 11), b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 11])
async def test_a_body_is_read_up_to_its_bound(raw: bytes) -> None:
    async with server(raw) as port:
        async with ask("GET", f"http://127.0.0.1:{port}/") as answer:
            assert await answer.body(11) == b"x" * 11
        async with ask("GET", f"http://127.0.0.1:{port}/") as answer:
            with pytest.raises(BodyTooLong):
                await answer.body(10)


async def test_pieces_arrive_before_the_end_and_leaving_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def play(sent: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nfirst")
        try:
            while True:
                await asyncio.sleep(0.01)
                writer.write(b"more")
                await writer.drain()
        finally:
            closed.set()

    async with server(play) as port:
        async with ask("GET", f"http://127.0.0.1:{port}/") as answer:
            assert (await anext(answer.pieces())).startswith(b"first")
        async with asyncio.timeout(5):
            await closed.wait()


async def test_many_small_pieces_leave_turns_to_others() -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 4000 + b"0\r\n\r\n"
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with server(raw) as port, ask("GET", f"http://127.0.0.1:{port}/") as answer:
        await asyncio.sleep(0.05)  # all of it has arrived
        task = asyncio.create_task(others())
        assert await answer.body(4000) == b"a" * 4000
        task.cancel()
    assert turns >= 50


@pytest.mark.parametrize("raw", [b"SSH-2.0-x\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"])
async def test_an_answer_that_is_not_whole_is_an_error_of_the_system(raw: bytes) -> None:
    async with server(raw) as port:
        with pytest.raises(BadAnswer):
            async with ask("GET", f"http://127.0.0.1:{port}/") as answer:
                await answer.body(100)


async def test_silence_is_bounded() -> None:
    asked = asyncio.Event()

    async def play(sent: bytes, writer: asyncio.StreamWriter) -> None:
        await asked.wait()

    async with server(play) as port:
        with pytest.raises(TimeoutError):
            async with ask("GET", f"http://127.0.0.1:{port}/", silent_s=0.05):
                pass
        asked.set()
        await asyncio.sleep(0.05)  # its connection is closed


@pytest.mark.parametrize("url", ["ftp://a.example/", "a.example", "http:///x"])
async def test_a_url_that_cannot_be_asked_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        async with ask("GET", url):
            pass
