"""docs/http.md has every route and every error code that a client may see."""

from __future__ import annotations

import ast
import re

from headrace.frontend.errors import FrontendError
from tests.docs.blocks import ROOT
from tests.support.frontend.fakes import Call, FakeIngress, frontend

PAGE = (ROOT / "docs" / "http.md").read_text()
# Errors that stop the start, that only a command meets, or that stand in a body of their own API.
ELSEWHERE = frozenset(
    {
        "address_unavailable",
        "certificate_unusable",
        "signing_keys_unusable",
        "audit_unusable",
        "tracing_unusable",
        "media_decoding_unusable",
        "model_served",
        "server_error",
        "refused",
    }
)


def codes() -> set[str]:
    """Collect the codes that the frontend's source names: as keyword, as an attribute, or in the table of translations."""
    found: set[str] = set()
    for file in sorted((ROOT / "frontend").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            value: ast.expr | None = None
            if isinstance(node, ast.keyword) and node.arg == "code":
                value = node.value
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_fixed":
                value = node.args[1]
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.add(value.value)
    return found


def subclasses(kind: type[FrontendError]) -> set[type[FrontendError]]:
    return {kind}.union(*(subclasses(below) for below in kind.__subclasses__()))


def test_every_error_code_is_on_the_page() -> None:
    # those of the frontend alone: the console, which other tests of the same run import, has some of its own
    kinds = {kind for kind in subclasses(FrontendError) if kind.__module__.startswith("headrace.frontend.")}
    named = codes() | {kind.code for kind in kinds if kind.code}
    assert len(named) > 60
    assert sorted(code for code in named - ELSEWHERE if f"`{code}`" not in PAGE) == []


def is_on_page(route: str) -> bool:
    """Look for the beginning of a route, and for the end behind an id, which the page may shorten to `…/end`."""
    before, _, tail = route.partition("{")
    start, last = before.rstrip("/") or "/", tail.rpartition("}")[2]
    return any(f"{mark}{start}" in PAGE for mark in "` ") and (not last or re.search(f"[}}…]{last}`", PAGE) is not None)


async def test_every_route_is_on_the_page() -> None:
    call = Call(frontend(FakeIngress(), adapter_routes=True).app, "/nowhere", method="GET")
    await call.run()
    routes = re.findall(r"/\S*", call.body.decode().partition("served here: ")[2].partition('"')[0])
    assert len(routes) > 40
    assert [route for route in routes if not is_on_page(route.rstrip(","))] == []


def test_a_route_that_is_missing_is_found() -> None:
    assert not is_on_page("/v1/nothing")
    assert not is_on_page("/v1/responses/{id}/nothing")
