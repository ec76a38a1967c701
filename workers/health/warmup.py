"""Warms up an engine with one short generation before its worker registers, so that no request pays for lazy initialisation."""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from headrace.broker.messages import Sampling
from headrace.workers.engine import POOLING_KINDS, DisaggStyle, Engine, EngineInfo, Handover, Output, Role, Sequence
from headrace.workers.errors import EngineStartFailed, WorkerError
from headrace.workers.health.pool_probe import pool_probe
from headrace.workers.runtime.runtime import Runtime

log = structlog.get_logger()

WARMUP_TOKENS = 4
POOLED_TOKENS = 64  # length of the warm-up input of a pooling engine
PREFILL_TOKENS = 512  # length of a prefill worker's warm-up prompt, which serves long prompts


async def warm_up(engine: Engine, runtime: Runtime, info: EngineInfo, *, token: int, role: Role, timeout_s: float) -> None:
    """Generate a few tokens and discard them. In the role `prefill` also offer a prompt's blocks and release them.

    `token`: the one with which the model's prompts begin. A pooling engine computes a vector instead. Raises EngineStartFailed
    if the engine cannot.
    """
    if POOLING_KINDS & set(info.kinds):
        await _pool(engine, info, token, timeout_s=timeout_s)
        return
    await _generate(engine, runtime, _sequence(info, "warm-up", token, 2 * info.block_size), timeout_s=timeout_s)
    if role is Role.PREFILL and engine.capabilities.disagg is DisaggStyle.PARAMS:
        sequence = _sequence(info, "warm-up-prefill", token, PREFILL_TOKENS)
        offered = msgspec.structs.replace(sequence, handover=Handover(kind="prefill"))
        await _generate(engine, runtime, offered, timeout_s=timeout_s)
        await engine.release(offered.id, None)
    log.info("engine.warm", tokens=WARMUP_TOKENS, role=role.value)


async def _pool(engine: Engine, info: EngineInfo, token: int, *, timeout_s: float) -> None:
    length = max(1, min(POOLED_TOKENS, info.context_length))
    item = pool_probe(info, "warm-up", _prompt(info, token, length))
    try:
        async with asyncio.timeout(timeout_s):
            await engine.pool(item)
    except TimeoutError:
        raise EngineStartFailed(f"the warm-up input was not answered within {timeout_s:g} s") from None
    except WorkerError as error:
        raise EngineStartFailed(f"the warm-up input failed: {error}") from error
    log.info("engine.warm", tokens=length, kinds=list(info.kinds))


def _prompt(info: EngineInfo, token: int, length: int) -> list[int]:
    return [token, *[1 if info.vocab_size > 1 else 0] * (length - 1)]


def _sequence(info: EngineInfo, name: str, token: int, wanted: int) -> Sequence:
    length = max(1, min(wanted, info.context_length // 2))
    return Sequence(
        id=name,
        token_ids=_prompt(info, token, length),
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
