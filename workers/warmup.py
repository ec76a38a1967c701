"""One short generation before a worker registers: the first real request must not pay for lazy initialisation."""

from __future__ import annotations

import asyncio

import structlog

from broker.messages import Sampling
from workers.engine import Engine, EngineInfo, Output, Sequence
from workers.errors import EngineStartFailed
from workers.runtime import Runtime

log = structlog.get_logger()

WARMUP_TOKENS = 4


async def warm_up(engine: Engine, runtime: Runtime, info: EngineInfo, *, timeout_s: float) -> None:
    """Generate a few tokens and throw them away. Raises EngineStartFailed when the engine cannot."""
    done: asyncio.Future[Output] = asyncio.get_running_loop().create_future()

    def sink(outputs: list[Output]) -> None:
        for output in outputs:
            if (output.finish is not None or output.fault is not None) and not done.done():
                done.set_result(output)

    length = max(1, min(2 * info.block_size, info.context_length // 2))
    token = 1 if info.vocab_size > 1 else 0
    runtime.tap(sink)
    try:
        async with asyncio.timeout(timeout_s):
            await engine.submit(
                Sequence(
                    id="warm-up",
                    token_ids=[token] * length,
                    prompt_tokens=length,
                    sampling=Sampling(temperature=0.0, max_tokens=WARMUP_TOKENS, ignore_eos=True),
                )
            )
            output = await done
    except TimeoutError:
        raise EngineStartFailed(f"the warm-up request was not answered within {timeout_s:g} s") from None
    finally:
        runtime.tap(None)
    if output.fault is not None:
        raise EngineStartFailed(f"the warm-up request failed: {output.fault.message}")
    log.info("engine.warm", tokens=WARMUP_TOKENS)
