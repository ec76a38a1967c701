"""Asks an engine for one token, or one vector, to see that it answers.

The prompt is the model's own first token alone, so that nothing is cached and hardly anything computed.
"""

from __future__ import annotations

import asyncio
from itertools import count

from headrace.broker.messages import Sampling
from headrace.workers.engine import POOLING_KINDS, Engine, EngineInfo, Output, Sequence
from headrace.workers.errors import WorkerError
from headrace.workers.health.pool_probe import pool_probe
from headrace.workers.runtime.runtime import Runtime


class EngineProbe:
    """Asks one engine, through the runtime that runs it. `token` is the prompt."""

    def __init__(self, engine: Engine, runtime: Runtime, info: EngineInfo, *, token: int) -> None:
        self._engine = engine
        self._runtime = runtime
        self._info = info
        self._token = token
        self._numbers = count(1)

    async def ask(self) -> float:
        """Return the seconds that the answer took. Raises WorkerError if the engine refuses or fails; a refusal is an answer.

        The caller limits the time: an engine that has died silently never answers.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        await (self._pool() if POOLING_KINDS & set(self._info.kinds) else self._generate())
        return loop.time() - began

    async def _generate(self) -> None:
        done: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        name = f"canary-{next(self._numbers)}"

        def on_output(output: Output) -> None:
            if (output.finish is not None or output.fault is not None) and not done.done():
                done.set_result(output)

        sampling = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
        self._runtime.raw.submit_raw(Sequence(id=name, token_ids=[self._token], prompt_tokens=1, sampling=sampling), on_output)
        try:
            fault = (await done).fault
        finally:
            if not done.done() or done.cancelled():
                self._runtime.raw.abort_raw(name)
        if fault is not None:
            raise WorkerError(fault.message)

    async def _pool(self) -> None:
        tokens = [self._token] * (2 if "score" in self._info.kinds else 1)
        await self._engine.pool(pool_probe(self._info, f"canary-{next(self._numbers)}", tokens))
        self._runtime.watchdog.stepped()
