"""Serves what the planner wants to autoscalers, beside its probes and metrics.

`/desired`: all pools and roles. `/desired/<pool>/<role>`: one number, as KEDA's `metrics-api` reads it (`valueLocation`:
`desired`). A plan that is too old is an error and no number: a scaler then keeps what there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any
from wsgiref.simple_server import make_server

import msgspec

from headrace.broker.part_state import PartState
from headrace.commands.probe_server import ProbeHandler, ProbeServer, probe_app
from headrace.planner.plan import Plan


class DesiredPage:
    """The last plan of each pool, readable from any thread."""

    def __init__(self, *, fresh_s: float, wall: Callable[[], float] = time.time) -> None:
        """`fresh_s`: a plan is served for so long."""
        self._fresh_s = fresh_s
        self._wall = wall
        self._plans: dict[str, Plan] = {}

    def put(self, plans: Iterable[Plan]) -> None:
        """Replace the plans of these pools."""
        self._plans = {**self._plans, **{plan.pool: plan for plan in plans}}

    def answer(self, path: str) -> tuple[int, Any]:
        """Return HTTP status and body of a path below `/desired`."""
        plans = {pool: plan for pool, plan in self._plans.items() if self._wall() - plan.at <= self._fresh_s}
        parts = [part for part in path.split("/") if part][1:]
        if not parts:
            return (200, {"pools": [_row(plan) for plan in plans.values()]}) if plans else (503, {"error": "no fresh plan"})
        plan = plans.get(parts[0])
        if plan is None:
            known = parts[0] in self._plans
            return (503, {"error": "the plan is old"}) if known else (404, {"error": f"no pool {parts[0][:80]!r}"})
        if len(parts) == 1:
            return 200, _row(plan)
        if len(parts) > 2 or parts[1] not in plan.desired:
            return 404, {"error": f"pool {plan.pool} has the roles {', '.join(plan.desired) or 'of no worker'}"}
        return 200, {"desired": plan.desired[parts[1]], "supply": plan.supply.get(parts[1], 0), "reason": plan.reason}


def _row(plan: Plan) -> dict[str, Any]:
    return {
        "pool": plan.pool,
        "model": plan.model,
        "at": plan.at,
        "reason": plan.reason,
        "desired": plan.desired,
        "supply": plan.supply,
    }


def page_app(page: DesiredPage, state: PartState) -> Callable[..., Iterable[bytes]]:
    """Return the WSGI application: the page, and the probes of the process."""
    probes = probe_app(state)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path != "/desired" and not path.startswith("/desired/"):
            return probes(environ, start_response)
        status, body = page.answer(path)
        texts = {200: "200 OK", 404: "404 Not Found", 503: "503 Service Unavailable"}
        start_response(texts[status], [("content-type", "application/json"), ("cache-control", "no-store")])
        return [msgspec.json.encode(body)]

    return app


def serve_page(host: str, port: int, page: DesiredPage, state: PartState) -> int:
    """Serve in a thread that ends with the process. Returns the port. Raises OSError when the address cannot be used."""
    server = make_server(host, port, page_app(page, state), ProbeServer, ProbeHandler)
    Thread(target=server.serve_forever, name="planner-page", daemon=True).start()
    return int(server.server_port)
