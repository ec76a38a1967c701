"""The yardstick: the same engine called in-process, without HTTP, queue or frames."""

from __future__ import annotations

import asyncio
import time

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, Output, Sequence
from headrace.workers.sim.engine import SimEngine

PROMPT_TOKENS = 64


async def direct_first_token_s(requests: int, *, tokens: int = 16) -> list[float]:
    """Time to first token of each request, one after the other."""
    waiting: dict[str, asyncio.Future[float]] = {}
    ended: dict[str, asyncio.Future[None]] = {}

    def sink(outputs: list[Output]) -> None:
        now = time.perf_counter()
        for output in outputs:
            first = waiting.pop(output.id, None)
            if first is not None:
                first.set_result(now)
            if output.finish is not None:
                ended.pop(output.id).set_result(None)

    engine = SimEngine()
    await engine.start(EngineConfig(model="sim", served_name="sim"), sink)
    times = []
    loop = asyncio.get_running_loop()
    for n in range(requests):
        name = f"d{n}"
        first = waiting[name] = loop.create_future()
        end = ended[name] = loop.create_future()
        started = time.perf_counter()
        await engine.submit(
            Sequence(
                id=name,
                token_ids=[n % 1000 + 10] * PROMPT_TOKENS,
                prompt_tokens=PROMPT_TOKENS,
                sampling=Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True),
            )
        )
        times.append(await first - started)
        await end
    await engine.stop(1.0)
    return times
