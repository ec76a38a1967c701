"""Merges the answers of several jobs into one, for a completions request with several prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from types import TracebackType

import msgspec

from headrace.broker.ingress.journey import Journey
from headrace.broker.jobs import Job
from headrace.broker.messages import Row
from headrace.frontend.ports import JobAnswer, JobPort


async def submit_all(port: JobPort, jobs: Sequence[Job]) -> list[JobAnswer]:
    """Submit all jobs at once. If one is refused, withdraw the others and raise its error."""
    answers: list[JobAnswer | None] = [None] * len(jobs)

    async def one(i: int, job: Job) -> None:
        answers[i] = await port.submit(job)

    try:
        async with asyncio.TaskGroup() as group:
            for i, job in enumerate(jobs):
                group.create_task(one(i, job))
    except BaseException as error:
        for answer in answers:
            if answer is not None:
                answer.cancel()
        raise (error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error) from None
    return [a for a in answers if a is not None]


class MergedAnswer:
    """An answer with the choices of all jobs, numbered in the order of the jobs. The first job that fails, fails the answer.

    Use it as a context manager.
    """

    def __init__(self, answers: Sequence[JobAnswer], *, choices: Sequence[int]) -> None:
        """`choices` has the number of choices per job."""
        self._answers = answers
        self._first = [0, *accumulate(choices)]
        self._open = list(choices)
        self._reading: dict[asyncio.Task[list[Row]], int] = {}

    async def __aenter__(self) -> MergedAnswer:
        for index in range(len(self._answers)):
            self._read(index)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        self.cancel()

    def _read(self, index: int) -> None:
        task = asyncio.get_running_loop().create_task(self._answers[index].rows())  # cancelled by __aexit__ at the latest
        self._reading[task] = index

    @property
    def journey(self) -> Journey | None:
        """Return None: the answers below are followed one by one."""
        return None

    async def rows(self) -> list[Row]:
        """Return the rows of all jobs that have some; empty once all are read. Raises the error of the first failing job."""
        if not self._reading:
            return []
        done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
        merged: list[Row] = []
        failed: BaseException | None = None
        for task in sorted(done, key=self._reading.__getitem__):
            index = self._reading.pop(task)
            if (error := task.exception()) is not None:
                failed = failed or error
                continue
            rows = task.result()
            base = self._first[index]
            merged += [msgspec.structs.replace(row, choice=base + row.choice) for row in rows] if base else rows
            self._open[index] -= sum(row.fin is not None for row in rows)
            if rows and self._open[index] > 0:
                self._read(index)
        if failed is not None:
            raise failed
        return merged

    def cancel(self) -> None:
        """Cancel all jobs."""
        for answer in self._answers:
            answer.cancel()
