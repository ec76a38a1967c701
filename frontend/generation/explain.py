"""The header that explains the placement of a request, and the merged answer of several jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import accumulate
from types import TracebackType
from typing import Any

import msgspec

from headrace.broker.jobs import Job
from headrace.broker.messages.control import Explanation
from headrace.broker.messages.frames import Row
from headrace.frontend.generation.job_options import DECISION_HEADER
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.ports import JobAnswer, JobPort, SubmittedAnswer

EXPLAIN_TIMEOUT_S = 0.5  # the first token waits for this long
MAX_HEADER_BYTES = 4096  # servers and proxies refuse much longer ones
DIGITS = 4


class Explained:
    """An answer that fetches the router's explanation with its first rows, when the request has been placed."""

    def __init__(self, answer: JobAnswer, port: JobPort, job: str, exchange: HttpExchange) -> None:
        """`job` is the id of the job to explain, the first one of the request."""
        self._answer = answer
        self._port = port
        self._job = job
        self._exchange = exchange
        self._explained = False

    async def rows(self) -> list[Row]:
        rows = await self._answer.rows()
        if not self._explained:
            self._explained = True
            explanation = await self._port.explain(self._job, timeout_s=EXPLAIN_TIMEOUT_S)
            self._exchange.more_headers.append((DECISION_HEADER, decision_header(explanation)))
        return rows

    def cancel(self) -> None:
        self._answer.cancel()


def decision_header(explanation: Explanation) -> bytes:
    """Return the explanation as one line of JSON, with the chosen worker first, then the cheapest ones that fit."""
    values: dict[str, Any] = _rounded(msgspec.to_builtins(explanation))
    values.pop("v", None)
    candidates = sorted(explanation.candidates, key=lambda c: (c.worker != explanation.worker, bool(c.why_not), c.cost_s))
    values["known"] = explanation.known
    while True:
        if candidates:
            values["candidates"] = [_rounded(msgspec.to_builtins(candidate)) for candidate in candidates]
        line = json.dumps(values, separators=(",", ":")).encode("ascii")
        if len(line) <= MAX_HEADER_BYTES or not candidates:
            return line[:MAX_HEADER_BYTES]
        candidates = candidates[: len(candidates) // 2]
        values["left_out"] = len(explanation.candidates) - len(candidates)
        values.pop("candidates")


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, DIGITS) if isinstance(value, float) else value for key, value in values.items()}


async def submit_all(port: JobPort, jobs: Sequence[Job]) -> list[SubmittedAnswer]:
    """Submit all jobs at once. If one is refused, withdraw the others and raise its error."""
    answers: list[SubmittedAnswer | None] = [None] * len(jobs)

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
        for answer in self._answers:
            answer.cancel()
