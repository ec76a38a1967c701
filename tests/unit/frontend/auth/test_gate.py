"""What is refused before the body of a request is read."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from headrace.broker.keys import SCOPES
from headrace.frontend.auth.gate import ANY, OPEN, PageGuard, check_body_type, host_name, scope_of
from headrace.frontend.errors import BadRequest, HostRefused, MediaTypeRefused, OriginRefused
from tests.support.frontend.fakes import Call, FakeIngress, chat, frontend, post

CHAT = "/v1/chat/completions"


def ask(headers: dict[str, str], path: str = CHAT, **settings: Any) -> Call:
    return Call(frontend(FakeIngress(), **settings).app, path, chat(), headers=headers)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"host": "rebound.evil.example"}, 403, "host_refused"),
        ({"origin": "https://evil.example"}, 403, "origin_refused"),
        ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ({"sec-fetch-site": "cross-site"}, 403, "origin_refused"),
        ({"transfer-encoding": "gzip, chunked"}, 400, "invalid_parameter"),
    ],
)
async def test_a_page_gets_no_answer(headers: dict[str, str], status: int, code: str) -> None:
    call = await ask(headers).run()
    assert (call.status, call.error["code"]) == (status, code)
    assert call.received == 0


async def test_a_refusal_has_the_form_of_the_api() -> None:
    anthropic = await ask({"origin": "https://evil.example"}, "/v1/messages").run()
    assert anthropic.json()["error"]["type"] == "permission_error"
    ollama = await ask({"origin": "https://evil.example"}, "/api/chat").run()
    assert "evil.example" in ollama.json()["error"]


async def test_routes_that_change_nothing_are_guarded_too() -> None:
    app = frontend(FakeIngress()).app
    call = await Call(app, "/v1/models", method="GET", headers={"host": "rebound.evil.example"}).run()
    assert call.status == 403


@pytest.mark.parametrize("name", ["x-headrace-tenant", "host", "authorization", "x-api-key", "content-type", "origin"])
async def test_a_doubled_header_that_decides_is_refused(name: str) -> None:
    call = ask({})
    call.scope["headers"] = [*call.scope["headers"], (name.encode(), b"a"), (name.encode(), b"b")]  # type: ignore[misc]
    await call.run()
    assert (call.status, call.error["param"], call.error["code"]) == (400, name, "doubled_header")


@pytest.mark.parametrize(("version", "host"), [("1.1", None), ("0.9", "localhost")])
async def test_a_request_without_host_or_version_is_refused(version: str, host: str | None) -> None:
    call = ask({} if host is None else {"host": host})
    if host is None:
        call.scope["headers"] = [h for h in call.scope["headers"] if h[0] != b"host"]  # type: ignore[attr-defined]
    call.scope["http_version"] = version
    assert (await call.run()).status == 400


async def test_the_old_protocol_needs_no_host() -> None:
    call = ask({})
    call.scope["headers"] = [h for h in call.scope["headers"] if h[0] != b"host"]  # type: ignore[attr-defined]
    call.scope["http_version"] = "1.0"
    assert (await call.run()).status == 200


async def test_a_body_needs_its_type_only_if_there_is_one() -> None:
    call = await Call(frontend(FakeIngress()).app, CHAT).run()
    assert call.status == 400
    assert (await post(frontend(FakeIngress()).app, chat())).status == 200


@pytest.mark.parametrize("kind", [b"application/json", b"Application/JSON ; charset=latin-1", b"application/vnd.api+json"])
def test_json_is_taken_where_it_is_declared(kind: bytes) -> None:
    check_body_type(CHAT, kind, from_page=False)


@pytest.mark.parametrize(
    "kind", [None, b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"", b"json"]
)
def test_what_a_form_can_send_is_no_json(kind: bytes | None) -> None:
    with pytest.raises(MediaTypeRefused, match="application/json"):
        check_body_type(CHAT, kind, from_page=False)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/uploads/upload_1/parts", "/v1/audio/transcriptions"])
def test_forms_are_taken_where_a_file_comes_in_one(path: str) -> None:
    check_body_type(path, b"multipart/form-data; boundary=x", from_page=False)
    with pytest.raises(MediaTypeRefused, match="multipart/form-data"):
        check_body_type(path, b"application/json", from_page=False)


def test_ollamas_routes_take_what_curl_sends_but_not_what_a_page_sends() -> None:
    for kind in (None, b"application/x-www-form-urlencoded"):
        check_body_type("/api/chat", kind, from_page=False)
        with pytest.raises(MediaTypeRefused):
            check_body_type("/api/chat", kind, from_page=True)
    with pytest.raises(MediaTypeRefused):
        check_body_type("/api/chat", b"text/plain", from_page=False)


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


# Routes that say nothing about tenants, models or load.
HARMLESS = {"/", "/docs", "/openapi.json", "/version", "/api/version"}


def routes() -> list[tuple[str, str]]:
    app = frontend(FakeIngress()).app
    starlette = app._app  # type: ignore[attr-defined]
    assert isinstance(starlette, Starlette)
    found = [(m, r.path) for r in starlette.routes if isinstance(r, Route) for m in r.methods or ()]
    return sorted({*found, *(("POST", path) for path in app._hot)})  # type: ignore[attr-defined]


def test_only_probes_are_open_and_only_harmless_routes_take_any_key() -> None:
    table = {(method, path): scope_of(method, path) for method, path in routes()}
    assert {path for (_, path), scope in table.items() if scope == OPEN} == {"/live", "/ready", "/health", "/ping"}
    assert {path for (_, path), scope in table.items() if scope == ANY} == HARMLESS
    assert set(table.values()) - {OPEN, ANY} <= set(SCOPES)
    assert len(table) > 60


def test_what_no_route_has_needs_a_key_too() -> None:
    assert scope_of("GET", "/v1/no-such-thing") == ANY
    assert scope_of("POST", "/live/../v1/files") == ANY
