"""`/openapi.json` and what is served are the same."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.routing import Route

from headrace.frontend.openapi import build_openapi
from tests.support.frontend.fakes import FakeIngress, frontend

DOCUMENT: dict[str, Any] = json.loads(build_openapi())


def bare(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


def test_every_route_is_described_and_nothing_else() -> None:
    observed: Any = frontend(FakeIngress()).app
    served = {
        (method, bare(route.path))
        for route in observed._app.routes
        if isinstance(route, Route)
        for method in (route.methods or {"POST"}) - {"HEAD"}
    }
    described = {
        (method.upper(), bare(path)) for path, item in DOCUMENT["paths"].items() for method in item if method != "parameters"
    }
    assert described == served


def test_every_reference_leads_somewhere() -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT)))
    assert names <= DOCUMENT["components"]["schemas"].keys()


def test_every_post_route_says_what_its_errors_look_like() -> None:
    for path, item in DOCUMENT["paths"].items():
        if "requestBody" in item.get("post", {}):
            assert {"400", "404", "413", "429", "503"} <= item["post"]["responses"].keys(), path


def test_only_the_messages_api_has_a_status_of_its_own() -> None:
    having = {path for path, item in DOCUMENT["paths"].items() if "529" in item.get("post", {}).get("responses", {})}
    assert having == {"/v1/messages", "/v1/messages/count_tokens"}
