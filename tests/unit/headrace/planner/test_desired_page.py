from __future__ import annotations

from typing import Any

import msgspec

from headrace.broker.part_state import PartState
from headrace.planner.desired_page import DesiredPage, page_app
from headrace.planner.plan import Plan

PLAN = Plan(at=100.0, model="m", pool="m-1", reason="steady", desired={"aggregated": 3}, supply={"aggregated": 2})


def page(now: float, *plans: Plan) -> DesiredPage:
    found = DesiredPage(fresh_s=30.0, wall=lambda: now)
    found.put(plans)
    return found


def test_one_number_is_served_for_an_autoscaler() -> None:
    assert page(110, PLAN).answer("/desired/m-1/aggregated") == (200, {"desired": 3, "supply": 2, "reason": "steady"})


def test_all_pools_and_one_pool_are_served() -> None:
    row = {
        "pool": "m-1",
        "model": "m",
        "at": 100.0,
        "reason": "steady",
        "desired": {"aggregated": 3},
        "supply": {"aggregated": 2},
    }
    assert page(110, PLAN).answer("/desired") == (200, {"pools": [row]})
    assert page(110, PLAN).answer("/desired/m-1") == (200, row)


def test_an_old_plan_is_an_error_and_not_a_number() -> None:
    assert page(131, PLAN).answer("/desired/m-1/aggregated")[0] == 503
    assert page(131, PLAN).answer("/desired")[0] == 503
    assert page(0).answer("/desired")[0] == 503


def test_what_is_not_there_is_an_error_and_not_zero() -> None:
    assert page(110, PLAN).answer("/desired/other/aggregated")[0] == 404
    assert page(110, PLAN).answer("/desired/m-1/prefill")[0] == 404
    assert page(110, PLAN).answer("/desired/m-1/aggregated/more")[0] == 404


def test_the_probes_of_the_process_are_beside_it() -> None:
    said: list[str] = []
    app = page_app(page(110, PLAN), PartState("planner"))

    def ask(path: str) -> Any:
        return b"".join(app({"PATH_INFO": path, "REQUEST_METHOD": "GET"}, lambda status, _headers: said.append(status)))

    assert msgspec.json.decode(ask("/desired/m-1/aggregated"))["desired"] == 3
    assert msgspec.json.decode(ask("/live"))["status"] == "alive"
    assert ask("/desired/none/x")
    assert said == ["200 OK", "200 OK", "404 Not Found"]
