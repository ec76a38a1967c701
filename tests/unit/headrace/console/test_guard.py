"""Pages of other sites reach nothing, and nothing is changed without an admin key."""

from __future__ import annotations

import posixpath
import re
import time
from importlib.resources import files
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from headrace.broker.keys import KeyHash, KeyRecord, digest_of
from headrace.console.guard import KEY_HEADER, POLICY, ConsoleGuard, ConsolePages
from headrace.frontend.errors import Forbidden, HostRefused, OriginRefused, Unauthorized

KEY = "k" * 32


def guard(*records: KeyRecord, host: str = "127.0.0.1", private: bool = False, key: str = KEY) -> ConsoleGuard:
    async def stored() -> list[KeyRecord]:
        return list(records)

    return ConsoleGuard(host=host, key=key, private=private, stored=stored)


def record(text: str, **more: Any) -> KeyRecord:
    hashes = [KeyHash(sha256=digest_of(text.encode()))]
    return KeyRecord(**({"id": "a", "name": "a", "tenant": "_", "hashes": hashes, "scopes": ["admin"], "created": 1.0} | more))


def test_a_page_whose_name_leads_here_is_refused() -> None:
    with pytest.raises(HostRefused):
        guard().check_page("GET", {"host": "evil.example:8001"})


def test_a_page_of_another_site_may_not_ask() -> None:
    with pytest.raises(OriginRefused):
        guard().check_page("POST", {"host": "localhost:8001", "origin": "https://evil.example"})
    with pytest.raises(OriginRefused):
        guard().check_page("POST", {"host": "localhost:8001", "sec-fetch-site": "cross-site"})


def test_the_consoles_own_page_may_ask() -> None:
    guard().check_page("POST", {"host": "localhost:8001", "origin": "http://localhost:8001"})


async def test_without_a_key_it_only_shows() -> None:
    await guard().check_reader({})
    with pytest.raises(Forbidden):
        await guard().check_admin({})
    with pytest.raises(Forbidden):
        await guard().check_admin({KEY_HEADER: "wrong"})
    await guard().check_admin({KEY_HEADER: KEY})


@pytest.mark.parametrize("more", [{"private": True}, {"host": "0.0.0.0"}])
async def test_a_private_or_reachable_console_shows_nothing_without_the_key(more: dict[str, Any]) -> None:
    with pytest.raises(Unauthorized):
        await guard(**more).check_reader({})
    await guard(**more).check_reader({KEY_HEADER: KEY})


async def test_an_empty_key_opens_nothing() -> None:
    assert not await guard(key="").is_admin({KEY_HEADER: ""})
    assert not await guard(key="").is_admin({})


@pytest.mark.parametrize(
    ("more", "opens"),
    [
        ({}, True),
        ({"scopes": ["generate", "metrics"]}, False),
        ({"revoked": 2.0}, False),
        ({"expires": 2.0}, False),
        ({"hashes": [KeyHash(sha256=digest_of(b"api-key"), until=2.0)]}, False),
        ({"hashes": [KeyHash(sha256=digest_of(b"api-key"), until=time.time() + 1e6)]}, True),
    ],
)
async def test_an_api_key_opens_the_console_only_with_the_scope_admin_and_while_it_is_good(
    more: dict[str, Any], opens: bool
) -> None:
    assert await guard(record("api-key", **more)).is_admin({KEY_HEADER: "api-key"}) is opens


MOST_SCRIPT = 100_000  # bytes, not compressed
MOST_FIRST = 100_000  # of all that the first page needs
MOST_REQUESTS = 10  # after that for the page
ASSETS = files("headrace.console") / "assets"


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(Starlette(routes=ConsolePages().routes())), base_url="http://localhost"
    )


def test_all_scripts_together_are_small() -> None:
    sizes = ConsolePages().sizes()
    assert 0 < sum(size for name, size in sizes.items() if name.endswith(".js")) < MOST_SCRIPT


def test_the_page_asks_for_all_that_it_needs_at_once_and_for_little() -> None:
    """No script is found only when another one has arrived, and there is something to see before any."""
    page = (ASSETS / "index.html").read_text()
    asked = set(re.findall(r'(?:href|src)="/console/assets/([^"]+)"', page))
    needed, found = {"console.js"}, {"console.js"}
    while found:
        name = found.pop()
        for other in re.findall(r"""from ['"]([^'"]+)['"]""", (ASSETS / name).read_text()):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), other.removeprefix("/console/assets/")))
            found |= {path} - needed
            needed.add(path)
    assert len(needed) > 5
    assert needed <= asked
    sizes = ConsolePages().sizes()
    assert len(asked) <= MOST_REQUESTS
    assert sum(sizes[name] for name in {*asked, "index.html"}) < MOST_FIRST
    assert "<strong>Headrace</strong>" in page.partition("<body>")[2]


def test_nothing_comes_from_other_hosts() -> None:
    for name in ConsolePages().sizes():
        if name.endswith((".html", ".css")) or (name.endswith(".js") and not name.startswith("vendor/")):
            assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", (ASSETS / name).read_text()), name


def test_every_vendored_script_has_its_licence_and_origin() -> None:
    names = ConsolePages().sizes()
    origin = (ASSETS / "vendor" / "ORIGIN.txt").read_text()
    scripts = [name.removeprefix("vendor/") for name in names if name.startswith("vendor/") and name.endswith(".js")]
    assert scripts
    for script in scripts:
        assert f"{script} " in origin
    for licence in re.findall(r"[\w-]+\.LICENSE\.txt", origin):
        assert f"vendor/{licence}" in names


async def test_the_page_may_load_only_what_is_its_own() -> None:
    async with client() as http:
        page = await http.get("/console")
        assert page.headers["content-security-policy"] == POLICY
        assert "unsafe" not in POLICY
        assert "script-src 'self'" in POLICY
        for path in re.findall(r'(?:src|href)="(/[^"]+)"', page.text):
            assert (await http.get(path)).status_code == 200, path
        again = await http.get("/console", headers={"if-none-match": page.headers["etag"]})
        assert again.status_code == 304


async def test_names_outside_the_package_are_not_served() -> None:
    async with client() as http:
        for path in ("../app.py", "%2e%2e/app.py", "vendor/../../app.py", "nothing.js"):
            try:
                answer = await http.get(f"/console/assets/{path}")
            except Exception as error:  # the bare application has no handler for its errors
                assert type(error).__name__ == "RouteNotFound"  # noqa: PT017
            else:
                assert answer.status_code == 404
