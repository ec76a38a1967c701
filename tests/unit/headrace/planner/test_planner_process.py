"""The planner's process over a real server: one leads, a restart goes on, and an old plan is not served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from headrace.broker.codec import encode
from headrace.broker.messages import WorkerMember
from headrace.broker.part_state import PartState
from headrace.config.planner_settings import PlannerSettings
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from headrace.planner.desired_page import DesiredPage
from headrace.planner.planner_process import PlannerProcess

POOL = "m-00000001"
SETTINGS = PlannerSettings(tick_s=0.1, least=2, step_s=0.5)


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not met():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(connection: Connection, subjects: Subjects) -> AsyncIterator[tuple[PlannerProcess, DesiredPage]]:
    page = DesiredPage(fresh_s=30.0)
    process = PlannerProcess(connection, subjects, SETTINGS, page, None)
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
    page = DesiredPage(fresh_s=30.0)
    task = asyncio.create_task(PlannerProcess(connection, subjects, settings, page, None).run(PartState("planner")))
    try:
        await until(lambda: page.answer("/desired/z-00000002/aggregated")[1].get("desired") == 2)
        first = page.answer(f"/desired/{POOL}/aggregated")[1]
        assert (first["desired"], first["reason"]) == (1, "over_budget")
        assert page.answer("/desired/z-00000002/aggregated")[1]["reason"] == "below_minimum"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
