"""Sends a canary request to an idle engine, because a dead engine may still accept requests.

The canary generates one token from a prompt of one token, so that nothing is cached and hardly anything computed. If the token
does not come in time, the engine counts as dead before a client's request fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import structlog

from headrace.broker.messages import Sampling
from headrace.workers import metrics
from headrace.workers.engine import POOLING_KINDS, Engine, EngineInfo, Output, PoolItem, Sequence
from headrace.workers.errors import EngineDead, WorkerError
from headrace.workers.runtime.runtime import Runtime

log = structlog.get_logger()


class Canary:
    """Sends canaries to an idle engine while the runtime runs."""

    def __init__(
        self,
        engine: Engine,
        runtime: Runtime,
        info: EngineInfo,
        *,
        idle_s: float,
        timeout_s: float,
        serving: Callable[[], bool],
    ) -> None:
        """Send a canary after `idle_s` without a step, 0 = never. `serving` returns whether the worker accepts requests."""
        self._engine = engine
        self._runtime = runtime
        self._info = info
        self._idle_s = idle_s
        self._timeout_s = timeout_s
        self._serving = serving
        self._numbers = count(1)
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Send canaries until cancelled, or until the engine does not answer and is declared dead."""
        while self._idle_s and not self._runtime.dead.done():
            rest_s = self._idle_s - self._runtime.watchdog.idle_s
            if rest_s > 0 or not self._serving():
                await asyncio.sleep(max(rest_s, min(1.0, self._idle_s / 4)))
                continue
            async with self._runtime.exclusive:
                await self._probe()

    async def _probe(self) -> None:
        began = self._loop.time()
        try:
            async with asyncio.timeout(self._timeout_s):
                await (self._pool() if POOLING_KINDS & set(self._info.kinds) else self._generate())
        except TimeoutError:
            metrics.CANARIES.labels("silent").inc()
            self._runtime.watchdog.declare_dead(
                f"a request of one token was not answered within {self._timeout_s:g} s after idling"
            )
        except EngineDead as error:
            metrics.CANARIES.labels("dead").inc()
            self._runtime.watchdog.declare_dead(str(error))
        except WorkerError as error:  # A refusal is an answer, too.
            metrics.CANARIES.labels("refused").inc()
            log.warning("canary.refused", error=str(error))
            self._runtime.watchdog.stepped()
        else:
            metrics.CANARIES.labels("answered").inc()
            log.debug("canary.answered", took_s=round(self._loop.time() - began, 3))

    async def _generate(self) -> None:
        done: asyncio.Future[Output] = self._loop.create_future()
        name = f"canary-{next(self._numbers)}"

        def on_output(output: Output) -> None:
            if (output.finish is not None or output.fault is not None) and not done.done():
                done.set_result(output)

        sampling = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
        self._runtime.raw.submit_raw(Sequence(id=name, token_ids=[self._token], prompt_tokens=1, sampling=sampling), on_output)
        try:
            fault = (await done).fault
        finally:
            if not done.done():
                self._runtime.raw.abort_raw(name)
        if fault is not None:
            raise WorkerError(fault.message)

    async def _pool(self) -> None:
        kinds = self._info.kinds
        task = "embed" if "embedding" in kinds else "classify"
        pair = "score" in kinds
        tokens = [self._token] * (2 if pair else 1)
        item = PoolItem(id=f"canary-{next(self._numbers)}", task=task, token_ids=tokens, second=1 if pair else None)  # type: ignore[arg-type]
        await self._engine.pool(item)
        self._runtime.watchdog.stepped()

    @property
    def _token(self) -> int:
        return 1 if self._info.vocab_size > 1 else 0
