"""The story of a request: a header that explains its placement, its log line, and the merged answer of several jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import accumulate
from types import TracebackType
from typing import Any

import msgspec

from headrace.broker.ingress.timeline import Journey
from headrace.broker.jobs import Job
from headrace.broker.messages.control import Explanation
from headrace.broker.messages.frames import Row
from headrace.frontend.generation.job_options import DECISION_HEADER
from headrace.frontend.generation.plan import Plan
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.metrics import Level
from headrace.frontend.ports import JobAnswer, JobPort

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

    @property
    def journey(self) -> Journey | None:
        """Return None: the answers below are followed one by one."""
        return None

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


class RequestStory:
    """Gathers references while the request runs. Its fields are made when it has ended, and only if they are logged."""

    __slots__ = ("_journeys", "_plan", "first_token_s", "level")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._journeys: Sequence[Journey | None] = ()
        self.first_token_s: float | None = None  # since the request came
        self.level: Level | None = None  # by the targets; None = not judged

    @property
    def model(self) -> str:
        return self._plan.jobs[0].card.model

    def used(self) -> tuple[int, int]:
        """Return the tokens of its prompts and answers, none of a request that was not answered."""
        counter = self._plan.counter
        return (counter.prompt, counter.completion) if counter.completion or counter.ended else (0, 0)

    def submitted(self, journeys: Sequence[Journey | None]) -> None:
        self._journeys = journeys

    @property
    def journeys(self) -> list[Journey]:
        """The journeys of its jobs, as far as its ingress keeps them."""
        return [journey for journey in self._journeys if journey is not None]

    def fields(self) -> dict[str, object]:
        """Return the fields; those that are not known are left out."""
        jobs, counter = self._plan.jobs, self._plan.counter
        job = jobs[0]
        fields: dict[str, object] = {"model": job.adapter or job.card.model, "tenant": job.tenant, "class": job.request_class}
        if len(jobs) > 1:
            fields["jobs"] = len(jobs)
        fields["prompt_tokens"] = counter.prompt
        if counter.ended:
            fields["cached_tokens"] = counter.cached
        fields["completion_tokens"] = counter.completion
        if self.first_token_s is not None:
            fields["ttft_s"] = round(self.first_token_s, DIGITS)
        journeys = self.journeys
        if len(journeys) == 1:
            journey = journeys[0]
            _add(fields, journey.queue_s, journey.workers, journey.attempts, journey.finish_reasons)
        elif journeys:
            waits = [journey.queue_s for journey in journeys if journey.queue_s is not None]
            _add(
                fields,
                max(waits, default=None),
                list(dict.fromkeys(worker for journey in journeys for worker in journey.workers)),
                max(journey.attempts for journey in journeys),
                list(dict.fromkeys(reason for journey in journeys for reason in journey.finish_reasons)),
            )
        return fields


def _add(
    fields: dict[str, object], queue_s: float | None, workers: list[str], attempts: int, finish_reasons: list[str]
) -> None:
    if queue_s is not None:
        fields["queue_s"] = round(queue_s, DIGITS)
    if workers:
        fields["workers"], fields["attempts"] = workers, attempts
    if finish_reasons:
        fields["finish_reason"] = ",".join(finish_reasons)


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
        for answer in self._answers:
            answer.cancel()
