"""Background tasks in a scope that exists from its owner's constructor on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class TaskScope:
    """The background tasks of one owner, in an `asyncio.TaskGroup` that is entered when the owner starts to run.

    Owners pass the scope to their parts when they construct them, so that no part has a task group that "must be set before".
    Leaving the scope waits for its tasks; an exception in one of them cancels the others and leaves the scope with it.
    A scope can be entered again after it was left, but not while it is open.
    """

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None

    @property
    def is_open(self) -> bool:
        return self._group is not None

    async def __aenter__(self) -> Self:
        """Open the scope. Raises RuntimeError if it is open already."""
        if self._group is not None:
            raise RuntimeError("this task scope is open already")
        group = asyncio.TaskGroup()
        await group.__aenter__()
        self._group = group
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all tasks, as `asyncio.TaskGroup` does. Tasks that are still running may spawn others until then."""
        try:
            if self._group is not None:
                await self._group.__aexit__(kind, error, trace)
        finally:
            self._group = None

    def spawn_guarded(self, work: Coroutine[Any, Any, None], failed: Callable[[Exception], None]) -> asyncio.Task[None]:
        """Run work that one message has asked for: an error in it is given to `failed` and does not end the scope.

        Raises RuntimeError, and closes `work`, if the scope is not open.
        """
        try:
            task = self.spawn(_guarded(work, failed))
        except RuntimeError:
            work.close()
            raise
        task.add_done_callback(lambda _: work.close())  # of a task that was cancelled before it began
        return task

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run `work` as a task of this scope. Raises RuntimeError, and closes `work`, if the scope is not open."""
        if self._group is None:
            work.close()
            raise RuntimeError("this task scope is not open: its owner does not run yet, or has ended")
        try:
            return self._group.create_task(work, name=name)
        except RuntimeError:  # it is about to end; from Python 3.13 on the group closes `work` itself
            work.close()
            raise


async def end_tasks(tasks: Collection[asyncio.Task[Any]], *, within_s: float, again_s: float) -> set[asyncio.Task[Any]]:
    """Cancel tasks and wait for their ends; return those that still run after `within_s`.

    Each is cancelled again every `again_s`: before Python 3.12 `asyncio.wait_for` loses a cancellation that comes when what it
    waits for has just ended.  The task that calls this is left out: it would wait for itself.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    left = {task for task in tasks if not task.done() and task is not asyncio.current_task()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=max(0.0, min(again_s, until - loop.time())))
        if loop.time() >= until:
            break
    return left


async def _guarded(work: Coroutine[Any, Any, None], failed: Callable[[Exception], None]) -> None:
    try:
        await work
    except Exception as error:
        failed(error)
