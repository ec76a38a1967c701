from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from headrace.broker.codec import encode
from headrace.broker.messages.members import WorkerMember
from headrace.broker.part_state import PartState
from headrace.config.options import PlannerSettings
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from headrace.planner.plan import Plan
from headrace.planner.process import DesiredPage, PlannerProcess, page_app

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


POOL = "m-00000001"
SETTINGS = PlannerSettings(tick_s=0.1, least=2, step_s=0.5)


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not met():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(
    connection: Connection, subjects: Subjects, settings: PlannerSettings = SETTINGS
) -> AsyncIterator[tuple[PlannerProcess, DesiredPage]]:
    page = DesiredPage(fresh_s=30.0)
    process = PlannerProcess(connection, subjects, settings, page, None)
    task = asyncio.create_task(process.run(PartState("planner")))
    try:
        yield process, page
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def join(connection: Connection, subjects: Subjects) -> None:
    member = WorkerMember(worker="w1", pool=POOL, model="m", slots=8)
    await connection.bucket(subjects.bucket("members")).put(f"worker.{POOL}.w1", encode(member))


def desired(page: DesiredPage) -> object:
    return page.answer(f"/desired/{POOL}/aggregated")[1].get("desired")


async def test_one_of_two_leads_and_both_serve_its_numbers_and_the_other_takes_over(
    connection: Connection, subjects: Subjects
) -> None:
    await join(connection, subjects)
    async with running(connection, subjects) as (other, others_page):
        await until(lambda: other.leading)
        async with running(connection, subjects) as (second, page):
            await until(lambda: desired(page) == 2 and desired(others_page) == 2)
            assert other.leading
            assert not second.leading
    async with running(connection, subjects) as (third, page):
        await until(lambda: third.leading and desired(page) == 2)


async def test_a_pool_without_workers_is_remembered_over_a_restart(connection: Connection, subjects: Subjects) -> None:
    await join(connection, subjects)
    async with running(connection, subjects) as (_, page):
        await until(lambda: desired(page) == 2)
    await connection.bucket(subjects.bucket("members")).delete(f"worker.{POOL}.w1")
    async with running(connection, subjects) as (process, page):
        await until(lambda: process.leading and page.answer(f"/desired/{POOL}/aggregated")[1].get("supply") == 0)
        assert desired(page) == 2


async def test_pools_of_one_budget_divide_it_and_the_one_that_is_named_comes_first(
    connection: Connection, subjects: Subjects
) -> None:
    for pool in (POOL, "z-00000002"):
        member = WorkerMember(worker=f"w-{pool}", pool=pool, model=pool[0], slots=8, price=2.0)
        await connection.bucket(subjects.bucket("members")).put(f"worker.{pool}.w-{pool}", encode(member))
    settings = PlannerSettings(tick_s=0.1, least=2, step_s=0.5, budget=6.0, priority="z")
    async with running(connection, subjects, settings) as (_, page):
        await until(lambda: page.answer("/desired/z-00000002/aggregated")[1].get("desired") == 2)
        first = page.answer(f"/desired/{POOL}/aggregated")[1]
        assert (first["desired"], first["reason"]) == (1, "over_budget")
        assert page.answer("/desired/z-00000002/aggregated")[1]["reason"] == "below_minimum"
