"""Every route of the application needs a key and a scope that somebody thought about."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from headrace.broker.keys.records import SCOPES
from headrace.frontend.auth.route_scopes import ANY, OPEN, scope_of
from tests.support.frontend.fakes import FakeIngress, frontend

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
