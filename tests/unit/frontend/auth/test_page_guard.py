"""Requests of web pages: by which name and from which page a browser sent them."""

from __future__ import annotations

import pytest

from headrace.frontend.auth.page_guard import PageGuard, host_name
from headrace.frontend.errors import BadRequest, HostRefused, OriginRefused


def guard(host: str = "127.0.0.1", hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()) -> PageGuard:
    return PageGuard(listens_on=host, allowed_hosts=hosts, origins=origins)


@pytest.mark.parametrize(
    "host", [b"localhost", b"LOCALHOST:8000", b"127.0.0.1:8000", b"[::1]:8000", b"[::1]", b"app.localhost:1"]
)
def test_the_names_of_the_loopback_address_are_good(host: bytes) -> None:
    guard().check("POST", host, None, None)


@pytest.mark.parametrize(
    "host", [b"rebound.evil.example", b"127.0.0.1.evil.example", b"evil.example:8000", b"localhost.evil.example", b"10.0.0.1"]
)
def test_a_name_that_a_page_can_make_resolve_here_is_refused(host: bytes) -> None:
    with pytest.raises(HostRefused, match="allowed_hosts"):
        guard().check("GET", host, None, None)


def test_a_refused_name_stays_refused_and_a_good_one_good() -> None:
    one = guard()
    for _ in range(2):
        one.check("GET", b"localhost", None, None)
        with pytest.raises(HostRefused):
            one.check("GET", b"evil.example", None, None)


@pytest.mark.parametrize("host", [b"", b":8000", b"a b", b"evil.example/localhost", b"x@localhost", b"localhost:80x", b"a,b"])
def test_what_is_no_host_is_refused(host: bytes) -> None:
    with pytest.raises((BadRequest, HostRefused)):
        guard().check("GET", host, None, None)


def test_names_that_the_operator_lists_are_good_beside_those_of_loopback() -> None:
    one = guard(hosts=("llm.example",))
    one.check("GET", b"llm.example:8000", None, None)
    one.check("GET", b"localhost", None, None)
    with pytest.raises(HostRefused):
        one.check("GET", b"evil.example", None, None)


def test_a_server_on_other_addresses_checks_names_only_if_it_is_told_some() -> None:
    guard("0.0.0.0").check("GET", b"any.example", None, None)
    with pytest.raises(HostRefused):
        guard("0.0.0.0", hosts=("llm.example",)).check("GET", b"any.example", None, None)
    guard(hosts=("*",)).check("GET", b"any.example", None, None)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (b"https://evil.example", b"127.0.0.1:8000"),
        (b"null", b"127.0.0.1:8000"),
        (b"http://127.0.0.1:9000", b"127.0.0.1:8000"),
        (b"file://", b"localhost"),
        (b"http://localhost", None),
    ],
)
def test_pages_of_other_sites_are_refused(origin: bytes, host: bytes | None) -> None:
    with pytest.raises(OriginRefused, match="cors_origins"):
        guard().check("POST", host, origin, None)


def test_the_pages_of_the_server_itself_and_listed_ones_may_call_it() -> None:
    guard().check("POST", b"localhost:8000", b"http://localhost:8000", b"same-origin")
    guard(origins=("https://app.example",)).check("POST", b"localhost:8000", b"https://app.example", b"cross-site")
    with pytest.raises(OriginRefused):
        guard(origins=("https://app.example",)).check("POST", b"localhost", b"https://app.example.evil", None)


def test_a_browser_that_hides_the_origin_still_says_that_the_site_is_another() -> None:
    with pytest.raises(OriginRefused):
        guard().check("POST", b"localhost", None, b"cross-site")
    guard().check("GET", b"localhost", None, b"cross-site")  # a link that was followed
    guard().check("POST", b"localhost", None, b"none")


def test_names_come_without_port_brackets_stay() -> None:
    assert [host_name(h) for h in (b"A.example:80", b"[::1]:80", b"[::1]", b"a.example.")] == [
        *("a.example", "[::1]", "[::1]", "a.example")
    ]


def test_hosts_that_were_found_good_are_remembered_up_to_a_bound() -> None:
    """A client that names another host each time must not fill the memory."""
    guard = PageGuard(listens_on="0.0.0.0", allowed_hosts=("*",), origins=())
    for number in range(2000):
        guard.check("GET", b"h%d.example" % number, None, None)
    assert len(guard._good_hosts) <= 256
