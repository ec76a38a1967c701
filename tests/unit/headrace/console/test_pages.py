"""The console's files are small, its own, and all that is served."""

from __future__ import annotations

import posixpath
import re
from importlib.resources import files

import httpx
from starlette.applications import Starlette

from headrace.console.pages import POLICY, ConsolePages

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
