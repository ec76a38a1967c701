"""Gives the client without asyncio: its loop runs in a thread of its own.

from headrace.client.sync import connect

with connect("nats://127.0.0.1:4222") as hr:
    print(hr.ask({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).text)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from headrace.broker.messages.durable import JobStatus
from headrace.client import client as aio
from headrace.client.client import ClientOptions, Given, ListedJob
from headrace.client.results import Result

T = TypeVar("T")
STOP_S = 10.0


@contextlib.contextmanager
def connect(url: str | None = None, options: ClientOptions | None = None) -> Iterator[SyncClient]:
    """Connect as `headrace.client.connect` does. Raises the ConnectError family."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="headrace client", daemon=True)
    thread.start()
    try:
        opened: Future[aio.Client] = Future()
        stop = asyncio.Event()
        serving = asyncio.run_coroutine_threadsafe(_serve(url, options, opened, stop), loop)
        try:
            yield SyncClient(opened.result(), loop)
        finally:
            loop.call_soon_threadsafe(stop.set)
            wait([serving])
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(STOP_S)
        loop.close()


async def _serve(url: str | None, options: ClientOptions | None, opened: Future[aio.Client], stop: asyncio.Event) -> None:
    """Hold the connection in one task, from its start to its end."""
    try:
        async with aio.connect(url, options) as client:
            opened.set_result(client)
            await stop.wait()
    except BaseException as error:
        if opened.done():
            raise
        opened.set_exception(error)


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, loop).result()


class SyncClient:
    """Jobs of one tenant. Its methods are those of `headrace.client.Client` and may be called from any thread."""

    def __init__(self, client: aio.Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def submit(self, request: Given, **options: Any) -> str:
        """Store a job and return its id. Raises NotSubmitted, NotConfirmed."""
        return _run(self._loop, self._client.submit(request, **options)).id

    def ask(self, request: Given, *, timeout_s: float | None = None, **options: Any) -> Result:
        """Store a job and wait for its result. Raises as `submit`, and ResultTimeout."""
        return self.result(self.submit(request, **options), timeout_s=timeout_s)

    def submit_all(self, requests: Iterable[Given], *, window: int | None = None, **options: Any) -> Iterator[Result]:
        """Submit many jobs, at most `window` open at once, and yield results as they come. Raises as `submit`.

        `requests` is read in the client's thread.
        """
        results = self._client.submit_all(requests, window=window, **options)
        try:
            while (result := _run(self._loop, _next(results))) is not None:
                yield result
        finally:
            _run(self._loop, _close(results))

    def result(self, job: str, *, timeout_s: float | None = None) -> Result:
        """Wait for the result of a job. Raises ResultTimeout; the job goes on all the same."""
        return _run(self._loop, self._client.result(job, timeout_s=timeout_s))

    def wait(self, jobs: Sequence[str], *, timeout_s: float | None = None) -> list[Result]:
        """Wait for the results of several jobs, in their order. Raises ResultTimeout."""
        return _run(self._loop, self._client.wait(jobs, timeout_s=timeout_s))

    def cancel(self, job: str) -> JobStatus:
        """End a job as `cancelled` unless it has ended, and return the status that stands. Raises UnknownJob."""
        return _run(self._loop, self._client.cancel(job))

    def peek(self, job: str) -> Result | None:
        """Return the result of a job if it has ended; None if it has not, or is not known."""
        return _run(self._loop, self._client.peek(job))

    def jobs(self, *, limit: int = 100) -> list[ListedJob]:
        """List jobs that have not ended, oldest first, then the latest results; at most `limit` of each."""
        return _run(self._loop, self._client.jobs(limit=limit))


async def _next(results: AsyncGenerator[Result]) -> Result | None:
    return await anext(results, None)


async def _close(results: AsyncGenerator[Result]) -> None:
    await results.aclose()
