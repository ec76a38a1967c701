"""Errors that no endpoint writes have the shape that the client of that API reads."""

from __future__ import annotations

import pytest

from headrace.frontend.metrics import Metrics
from headrace.frontend.startup_app import StartupApp
from headrace.frontend.status import Lifecycle
from tests.support.frontend.fakes import Call, FakeIngress, frontend


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("DELETE", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/", 404, "not_found_error"),
        ("POST", "/v1/messages/nonsense", 404, "not_found_error"),
        ("GET", "/v1/messages/batches", 404, "not_found_error"),
    ],
)
async def test_below_messages_it_is_anthropics(method: str, path: str, status: int, kind: str) -> None:
    call = await Call(frontend(FakeIngress()).app, path, {}, method=method).run()
    assert (call.status, call.json()["type"], call.error["type"]) == (status, "error", kind)
    assert set(call.error) == {"type", "message"}
    assert path in call.error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model":"m"}', b"\xff"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_bad_body_is_an_error_of_the_same_shape(path: str, body: bytes) -> None:
    call = await Call(frontend(FakeIngress()).app, path, body).run()
    assert (call.status, call.json()["type"], call.error["type"]) == (400, "error", "invalid_request_error")


async def test_a_client_of_anthropic_gets_it_everywhere_else_too() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    call = await Call(frontend(FakeIngress()).app, "/v1/vector_stores", method="GET", headers=headers).run()
    assert (call.status, call.json()["type"]) == (404, "error")
    call = await Call(frontend(FakeIngress()).app, "/v1/vector_stores", method="GET").run()
    assert set(call.json()) == {"error"}


async def test_before_the_broker_can_be_used_as_well() -> None:
    app = StartupApp(Metrics(), Lifecycle())
    call = await Call(app, "/v1/messages", {}).run()
    assert (call.status, call.error["type"], call.headers["retry-after"]) == (529, "overloaded_error", "1")
    call = await Call(app, "/v1/chat/completions", {}).run()
    assert (call.status, call.error["code"]) == (503, "broker_unavailable")


async def test_methods_are_listed_in_one_order() -> None:
    call = await Call(frontend(FakeIngress()).app, "/v1/models", {}, method="PATCH").run()
    assert (call.status, call.headers["allow"]) == (405, "GET, HEAD")
