"""A request of our own when there was none for a while: an engine may die in its sleep and still take requests in.

One token of a prompt of one token, so that nothing is cached and hardly anything computed.  If it does not come in time the
engine counts as dead before a client has to find out.
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
    """Run `run` beside the runtime."""

    def __init__(
        self,
        engine: Engine,
        runtime: Runtime,
        info: EngineInfo,
        *,
        idle_s: float,
        timeout_s: float,
        may: Callable[[], bool],
    ) -> None:
        """After `idle_s` without a step, 0 = never; `timeout_s` for the answer. `may()`: the worker takes requests."""
        self._engine = engine
        self._runtime = runtime
        self._info = info
        self._idle_s = idle_s
        self._timeout_s = timeout_s
        self._may = may
        self._numbers = count(1)
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Until cancelled, or until the engine does not answer: then the runtime knows that it is dead."""
        while self._idle_s and not self._runtime.dead.done():
            rest_s = self._idle_s - self._runtime.watchdog.idle_s
            if rest_s > 0 or not self._may():
                await asyncio.sleep(max(rest_s, min(1.0, self._idle_s / 4)))
                continue
            async with self._runtime.exclusive:
                await self._sing()

    async def _sing(self) -> None:
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
        except WorkerError as error:  # it answers, if only to refuse
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
