"""Fetching: every limit, against a server that does not keep to anything."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.frontend.errors import BadRequest
from headrace.frontend.prompts.media import MediaLoader
from headrace.frontend.prompts.media_fetch import (
    Fetcher,
    FetchFailed,
    FetchLimits,
    Forbidden,
    NoAnswer,
    Resolve,
    TooLarge,
    check_address,
    parse_url,
)
from headrace.frontend.prompts.media_parts import MediaPart
from headrace.frontend.settings import FrontendSettings
from tests.support.certificates import write_certificate
from tests.support.frontend.media_server import PNG, Play, answer, names, web_server


async def no_names(host: str, port: int) -> Sequence[str]:
    raise AssertionError(f"{host} was looked up")


def fetcher(resolve: Resolve = no_names, *, at_once: int = 4, **limits: Any) -> Fetcher:
    wishes: dict[str, Any] = {"max_bytes": 1000, "timeout_s": 5.0, "private": True, "any_port": True, **limits}
    return Fetcher(FetchLimits(**wishes), resolve, at_once=at_once)


async def fetch(play: Play | bytes, path: str = "/a.png", **limits: Any) -> bytes:
    async with web_server(play) as web:
        return await fetcher(**limits).fetch(web.url + path, lambda start: None)


async def test_a_body_is_fetched_under_the_name_that_was_asked_for() -> None:
    async with web_server(answer()) as web:
        fetching = fetcher(names({"pictures.example": ["127.0.0.1"]}))
        assert await fetching.fetch(f"http://pictures.example:{web.port}/a.png?b=1", lambda start: None) == PNG
        assert web.heads[0].startswith("GET /a.png?b=1 HTTP/1.1\r\n")
        assert f"Host: pictures.example:{web.port}\r\n" in web.heads[0]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (answer(b"x" * 2000), "2000 bytes; at most 1000"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000, "more than the 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000, "more than the 1000 bytes"),
    ],
)
async def test_a_body_over_the_limit_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(TooLarge, match=why):
        await fetch(raw)


async def test_a_body_without_end_is_read_no_further_than_the_limit() -> None:
    sent = 0

    async def flood(path: str, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            sent += 65536
            await writer.drain()

    with pytest.raises(TooLarge):
        await fetch(flood, max_bytes=1 << 20)
    assert sent < 64 << 20


async def test_a_packed_body_is_refused_and_never_unpacked() -> None:
    bomb = gzip.compress(b"\0" * (8 << 20))
    with pytest.raises(FetchFailed, match="content-encoding 'gzip'"):
        await fetch(answer(bomb, "Content-Encoding: gzip"), max_bytes=1 << 20)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", "without sending complete message body"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "without sending complete message body"),
        (b"HTTP/1.1 200", "without sending a response"),
        (b"SSH-2.0-OpenSSH_9\r\n", "not HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "not HTTP|status 101|before"),
        (answer(status="404 Not Found"), "answers with status 404"),
        (answer(status="206 Partial Content"), "answers with status 206"),
        (answer(status="302 Found"), "redirects to nowhere"),
        (b"HTTP/1.1 200 OK\r\n" + b"".join(b"a%d: b\r\n" % i for i in range(300)) + b"\r\n", "too many headers"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 40_000 + b"\r\n\r\n", "too many headers"),
    ],
)
async def test_answers_of_no_use_are_errors_that_say_why(raw: bytes, why: str) -> None:
    with pytest.raises(FetchFailed, match=why):
        await fetch(raw)


async def test_a_slow_server_is_given_up_after_the_time_limit() -> None:
    async def drip(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    with pytest.raises(TimeoutError):
        await fetch(drip, timeout_s=0.2)


async def test_no_more_than_the_limit_are_fetched_at_once() -> None:
    free = asyncio.Event()

    async def wait(path: str, writer: asyncio.StreamWriter) -> None:
        await free.wait()
        writer.write(answer())

    async with web_server(wait) as web:
        fetching = fetcher(at_once=2)
        tasks = [asyncio.create_task(fetching.fetch(web.url, lambda start: None)) for _ in range(6)]
        while web.open < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        free.set()
        assert await asyncio.gather(*tasks) == [PNG] * 6
        assert web.most_open == 2


async def test_the_first_bytes_can_end_the_fetching() -> None:
    def refuse(start: bytes) -> None:
        raise FetchFailed(f"starts with {start[:3]!r}")

    async def endless(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n<html>" + b"x" * 100)
        await asyncio.sleep(10)

    began = time.monotonic()
    with pytest.raises(FetchFailed, match="starts with b'<ht'"):
        async with web_server(endless) as web:
            await fetcher().fetch(web.url, refuse)
    assert time.monotonic() - began < 5  # not at the time limit


# -- private addresses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254"])
async def test_private_addresses_are_not_asked(host: str) -> None:
    with pytest.raises(Forbidden, match="not a public address"):
        await fetcher(private=False).fetch(f"http://{host}/", lambda start: None)


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["93.184.215.14", "10.0.0.1"], ["2606:4700::1", "::ffff:169.254.169.254"]]
)
async def test_a_name_with_any_private_address_is_not_asked(addresses: list[str]) -> None:
    with pytest.raises(NoAnswer, match=r"^sly\.example gives no answer that can be used$"):
        await fetcher(names({"sly.example": addresses}), private=False).fetch("http://sly.example/", lambda start: None)
    ours = fetcher(names({"sly.example": addresses}), private=False, domains=("sly.example",))
    with pytest.raises(Forbidden, match=r"^sly\.example is not at a public address$"):  # an operator who names it is told
        await ours.fetch("http://sly.example/", lambda start: None)


@pytest.mark.parametrize("raw", [b"SSH-2.0-OpenSSH_9\r\n", b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\na: " + b"b" * 200_000])
async def test_a_name_that_is_not_there_one_that_is_private_and_a_port_that_is_no_web_server_look_the_same(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise requests could be used to find out what there is in the operator's network."""
    told = set()
    async with web_server(raw) as web:
        found = names({"private.example": ["10.0.0.1"], "open.example": ["127.0.0.1"], "closed.example": ["127.0.0.2"]})
        for host in ("gone", "private", "open", "closed"):
            if host in ("open", "closed"):  # taken for public addresses, to get this far
                monkeypatch.setattr("headrace.frontend.prompts.media_fetch.check_address", lambda address: None)
            with pytest.raises(FetchFailed) as failed:
                await fetcher(found, private=False).fetch(f"http://{host}.example:{web.port}/", lambda start: None)
            told.add((type(failed.value), str(failed.value).replace(host, "x")))
    assert told == {(NoAnswer, "x.example gives no answer that can be used")}


class Lenient(Fetcher):
    """Takes the address of the test's own server for a public one, and no other."""

    async def _addresses(self, target: Any) -> Sequence[str]:
        return ["127.0.0.1"] if target.host == "public.example" else await super()._addresses(target)


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "//0x7f.1/",
        "http://inner.example/",
        "file:///etc/passwd",
    ],
)
async def test_a_redirect_to_a_private_address_is_not_followed(location: str) -> None:
    limits = FetchLimits(max_bytes=1000, timeout_s=5.0, any_port=True)
    resolve = names({"inner.example": ["10.0.0.8"]})
    async with web_server(answer(b"", f"Location: {location}", status="302 Found")) as web:
        with pytest.raises((Forbidden, NoAnswer)):
            await Lenient(limits, resolve, at_once=1).fetch(f"http://public.example:{web.port}/", lambda start: None)
        assert len(web.heads) == 1


async def test_a_name_is_resolved_once_and_what_was_checked_is_what_is_asked() -> None:
    asked: list[str] = []

    async def changing(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["93.184.215.14"] if len(asked) == 1 else ["127.0.0.1"]

    async with web_server(answer()) as web:
        with pytest.raises((FetchFailed, TimeoutError)):  # nobody is there, or it cannot be reached from here
            await fetcher(changing, private=False, timeout_s=0.3).fetch(f"http://twice.example:{web.port}/", lambda start: None)
        assert asked == ["twice.example"]
        assert not web.heads


async def test_redirects_are_followed_so_many_times() -> None:
    async def move(path: str, writer: asyncio.StreamWriter) -> None:
        left = int(path[1:])
        writer.write(answer() if not left else answer(b"moved", f"Location: /{left - 1}", status="307 Temporary Redirect"))

    assert await fetch(move, "/3", redirects=3) == PNG
    with pytest.raises(FetchFailed, match="more than 3 redirects"):
        await fetch(move, "/4", redirects=3)


@pytest.mark.parametrize(("domains", "code"), [([], "media_forbidden"), (["pictures.example"], "media_unreachable")])
async def test_an_operator_who_names_domains_may_have_any_port(domains: list[str], code: str) -> None:
    async def nowhere(host: str, port: int) -> Sequence[str]:
        raise OSError

    loader = MediaLoader(FrontendSettings(media_domains=domains), resolve=nowhere)
    part = MediaPart("image", "http://pictures.example:8080/a.png", "messages[0]")
    with pytest.raises(BadRequest) as refused:
        await loader.load([part])
    assert refused.value.code == code


async def test_a_redirect_from_https_to_http_is_not_followed(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with web_server(answer()) as plain:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer(b"", f"Location: {plain.url}/a.png", status="302 Found"))
            writer.close()

        secure = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=served)
        async with secure:
            port = secure.sockets[0].getsockname()[1]
            limits = FetchLimits(max_bytes=1000, timeout_s=5.0, private=True, any_port=True)
            fetching = Fetcher(limits, no_names, at_once=1, tls=trusting)
            with pytest.raises(Forbidden, match="from https to http"):
                await fetching.fetch(f"https://127.0.0.1:{port}/a.png", lambda start: None)
        assert plain.heads == []


PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "198.18.0.1",
    "203.0.113.7",
    "224.0.0.1",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "2002:7f00:1::1",
    "2002:a00:1::",
    "2001:0:7f00:1::1",
    "nonsense",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(Forbidden):
        check_address(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "93.184.215.14", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses_are_taken(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    ("spelling", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0x7f.1", "127.0.0.1"),
        ("017700000001", "127.0.0.1"),
        ("0177.0.0.01", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[0:0:0:0:0:ffff:7f00:1]", "::ffff:7f00:1"),
        ("１２７.0.0.1", "127.0.0.1"),
    ],
)
def test_every_spelling_of_an_address_is_that_address(spelling: str, address: str) -> None:
    target = parse_url(f"http://{spelling}/x")
    with pytest.raises(Forbidden):
        check_address(target.host)
    assert target.host in (address, "::ffff:127.0.0.1")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org/a.png",
        "file:///etc/passwd",
        "gopher://example.org/",
        "//example.org/a.png",
        "a.png",
        "http://",
        "http:///a.png",
        "http://user@example.org/",
        "http://user:secret@example.org/",
        "http://example.org:99999/",
        "http://example.org:0/",
        "http://example.org\\@127.0.0.1/",
        "http://exam\tple.org/",
        "http://example.org/\r\nHost: other",
        "http://example.org/a b",
        "http://[::1/",
        "http://-x.org/",
        "http://a..b/",
        "http://" + "a" * 64 + ".org/",
        "http://example.org/" + "a" * 9000,
        "http://ex%61mple.org/",
    ],
)
def test_what_is_not_a_plain_web_address_is_refused(url: str) -> None:
    with pytest.raises(Forbidden):
        parse_url(url)


def test_with_allowed_domains_only_they_and_what_is_below_them_are_asked() -> None:
    allowed = ("example.org",)
    assert parse_url("http://example.org/", allowed).host == "example.org"
    assert parse_url("http://img.example.org/", allowed).host == "img.example.org"
    for other in ("http://badexample.org/", "http://example.org.evil.net/", "http://8.8.8.8/"):
        with pytest.raises(Forbidden, match=r"allowed domains: example\.org"):
            parse_url(other, allowed)


async def test_only_ports_of_the_web_are_fetched_from() -> None:
    """Otherwise requests could be used to scan the ports of others."""
    for url in ("http://pictures.example:22/a.png", "https://8.8.8.8:8443/a.png"):
        with pytest.raises(Forbidden, match="only 80 and 443"):
            await fetcher(private=False, any_port=False).fetch(url, lambda start: None)  # and the name is not looked up

    async def nowhere(host: str, port: int) -> Sequence[str]:
        raise OSError

    with pytest.raises(FetchFailed, match="cannot be resolved"):
        await fetcher(nowhere, any_port=False).fetch("http://pictures.example:443/a.png", lambda start: None)
