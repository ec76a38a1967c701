"""One short generation before a worker registers: the first real request must not pay for lazy initialisation."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from broker.messages import Sampling
from workers.engine import DisaggStyle, Engine, EngineInfo, Handover, Output, Role, Sequence
from workers.errors import EngineStartFailed
from workers.runtime import Runtime

log = structlog.get_logger()

WARMUP_TOKENS = 4
PREFILL_TOKENS = 512  # of a prefill worker's warm-up prompt: it is there for long ones


async def warm_up(engine: Engine, runtime: Runtime, info: EngineInfo, *, role: Role, timeout_s: float) -> None:
    """Generate a few tokens and throw them away; in the role `prefill` also offer a prompt's blocks and take them back.

    Raises EngineStartFailed when the engine cannot.
    """
    await _generate(engine, runtime, _sequence(info, "warm-up", 2 * info.block_size), timeout_s=timeout_s)
    if role is Role.PREFILL and engine.capabilities.disagg is DisaggStyle.PARAMS:
        offered = replace(_sequence(info, "warm-up-prefill", PREFILL_TOKENS), handover=Handover(kind="prefill"))
        await _generate(engine, runtime, offered, timeout_s=timeout_s)
        await engine.release(offered.id, None)
    log.info("engine.warm", tokens=WARMUP_TOKENS, role=role.value)


def _sequence(info: EngineInfo, name: str, wanted: int) -> Sequence:
    length = max(1, min(wanted, info.context_length // 2))
    token = 1 if info.vocab_size > 1 else 0
    return Sequence(
        id=name,
        token_ids=[token] * length,
        prompt_tokens=length,
        sampling=Sampling(temperature=0.0, max_tokens=WARMUP_TOKENS, ignore_eos=True),
    )


async def _generate(engine: Engine, runtime: Runtime, sequence: Sequence, *, timeout_s: float) -> None:
    done: asyncio.Future[Output] = asyncio.get_running_loop().create_future()

    def sink(outputs: list[Output]) -> None:
        for output in outputs:
            if (output.finish is not None or output.fault is not None) and not done.done():
                done.set_result(output)

    runtime.tap(sink)
    try:
        async with asyncio.timeout(timeout_s):
            await engine.submit(sequence)
            output = await done
    except TimeoutError:
        raise EngineStartFailed(f"the warm-up request was not answered within {timeout_s:g} s") from None
    finally:
        runtime.tap(None)
    if output.fault is not None:
        raise EngineStartFailed(f"the warm-up request failed: {output.fault.message}")
