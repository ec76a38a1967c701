"""Which URLs and addresses are asked at all."""

from __future__ import annotations

import pytest

from headrace.frontend.media.addresses import Forbidden, check_address, parse_url

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


def test_a_url_is_taken_apart_as_it_will_be_asked_for() -> None:
    target = parse_url("HTTPS://Example.ORG:8443/ä b".replace(" ", "%20") + "?q=ü&r=1#fragment")
    assert (target.scheme, target.host, target.port) == ("https", "example.org", 8443)
    assert target.path == "/%C3%A4%20b?q=%C3%BC&r=1"
    assert target.host_header == "example.org:8443"
    assert parse_url("https://example.org./").host_header == "example.org"
    assert parse_url("http://[2606:4700::1111]/").host_header == "[2606:4700::1111]"
    assert parse_url("http://bücher.example/").host == "xn--bcher-kva.example"


def test_with_allowed_domains_only_they_and_what_is_below_them_are_asked() -> None:
    allowed = ("example.org",)
    assert parse_url("http://example.org/", allowed).host == "example.org"
    assert parse_url("http://img.example.org/", allowed).host == "img.example.org"
    for other in ("http://badexample.org/", "http://example.org.evil.net/", "http://8.8.8.8/"):
        with pytest.raises(Forbidden, match=r"allowed domains: example\.org"):
            parse_url(other, allowed)
