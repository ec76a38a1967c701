"""What is refused before the body of a request is read."""

from __future__ import annotations

from typing import Any

import pytest

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
