"""Task scopes: tasks run while the scope is open, and nothing is lost in silence before and after."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from headrace.jetstream.tasks import TaskScope, end_tasks


async def test_leaving_a_scope_waits_for_its_tasks() -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        await asyncio.sleep(0)
        done.append(number)

    scope = TaskScope()
    async with scope:
        assert scope.is_open
        scope.spawn(work(1))
        scope.spawn(work(2))
    assert sorted(done) == [1, 2]
    assert not scope.is_open


async def test_a_task_that_runs_while_the_scope_is_left_may_spawn_another() -> None:
    done: list[str] = []
    scope = TaskScope()

    async def second() -> None:
        done.append("second")

    async def first() -> None:
        await asyncio.sleep(0)
        scope.spawn(second())

    async with scope:
        scope.spawn(first())
    assert done == ["second"]


async def test_spawning_outside_of_a_scope_is_an_error_and_leaves_no_coroutine_behind() -> None:
    scope = TaskScope()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not open"):
            scope.spawn(asyncio.sleep(0))
        async with scope:
            pass


@pytest.mark.parametrize("guarded", [False, True])
async def test_spawning_while_a_scope_gives_up_is_an_error_and_leaves_no_coroutine_behind(*, guarded: bool) -> None:
    scope = TaskScope()
    late: list[str] = []

    async def nothing() -> None:
        """End at once."""

    async def fails() -> None:
        raise ValueError("boom")

    async def at_the_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:  # the scope is giving up its tasks
            work = nothing()
            try:
                if guarded:
                    scope.spawn_guarded(work, lambda error: None)
                else:
                    scope.spawn(work)
            except RuntimeError as error:
                late.append(str(error))
            assert work.cr_frame is None, "it was closed"

    async def run() -> None:
        async with scope:
            scope.spawn(at_the_end())
            await asyncio.sleep(0)
            scope.spawn(fails())

    with pytest.raises(ExceptionGroup) as raised:
        await run()
    assert [str(error) for error in raised.value.exceptions] == ["boom"]
    assert len(late) == 1


async def test_the_error_of_one_task_cancels_the_others_and_leaves_with_the_scope() -> None:
    cancelled = asyncio.Event()

    async def fail() -> None:
        raise ValueError("broken")

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    scope = TaskScope()

    async def run() -> None:
        async with scope:
            scope.spawn(wait())
            scope.spawn(fail())

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    assert [str(error) for error in caught.value.exceptions] == ["broken"]
    assert cancelled.is_set()
    assert not scope.is_open


async def test_a_scope_is_entered_once_at_a_time() -> None:
    scope = TaskScope()
    async with scope:
        again = scope.__aenter__()
        with pytest.raises(RuntimeError, match="open already"):
            await again


async def test_an_error_in_guarded_work_is_reported_and_ends_nothing_else() -> None:
    failed: list[Exception] = []
    done: list[str] = []

    async def fails() -> None:
        raise ValueError("this message")

    async def other() -> None:
        await asyncio.sleep(0.001)
        done.append("other")

    async with TaskScope() as scope:
        scope.spawn(other())
        scope.spawn_guarded(fails(), failed.append)
    assert ([str(error) for error in failed], done) == (["this message"], ["other"])


async def test_a_task_that_has_lost_its_cancellation_is_cancelled_again() -> None:
    times = 0

    async def work() -> None:
        nonlocal times
        while times < 3:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                times += 1

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    assert await end_tasks([task], within_s=60.0, again_s=0.01) == set()
    assert task.done()
    assert times == 3


async def test_tasks_that_go_on_are_told_and_the_own_one_is_left_alone() -> None:
    end = asyncio.Event()

    async def work() -> None:
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()

    own = asyncio.current_task()
    assert own is not None
    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    assert await end_tasks([task, own], within_s=0.05, again_s=0.01) == {task}
    assert not own.cancelling()
    end.set()
    await task
