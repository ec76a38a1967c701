"""Builds the small inputs with which a worker tries an engine that pools, or makes pictures or videos."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import msgspec
import structlog

from headrace.broker.messages.requests import Picture, PoolingTask, Sampling
from headrace.workers import metrics
from headrace.workers.engine import POOLING_KINDS, DisaggStyle, Engine, EngineInfo, Handover, Output, PoolItem, Role, Sequence
from headrace.workers.errors import EngineDead, EngineStartFailed, WorkerError
from headrace.workers.runtime.runtime import Runtime

_PICTURE = Picture(prompt="a test", width=64, height=64, steps=1)
_VIDEO = Picture(prompt="a test", width=64, height=64, steps=1, seconds=1)
_MADE: dict[PoolingTask, Picture] = {"image": _PICTURE, "video": _VIDEO}


def pool_probe(info: EngineInfo, name: str, token_ids: list[int]) -> PoolItem:
    """Return an input of a task that the engine serves. A pair needs two tokens or more."""
    kinds = info.kinds
    made: PoolingTask | None = next((task for task in _MADE if task in kinds), None)
    task: PoolingTask = made or ("embed" if "embedding" in kinds else "classify")
    return PoolItem(
        id=name,
        task=task,
        token_ids=token_ids,
        second=(len(token_ids) // 2 or None) if "score" in kinds else None,
        picture=_MADE.get(task),
    )


# Asks an engine for one token, or one vector, to see that it answers.
#
# The prompt is the model's own first token alone, so that nothing is cached and hardly anything computed.


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


# Sends a canary request to an idle engine, because a dead engine may still accept requests.
#
# If its answer does not come in time, the engine counts as dead before a client's request fails.

log = structlog.get_logger()


class Canary:
    """Sends canaries to an idle engine while the runtime runs."""

    def __init__(
        self, probe: EngineProbe, runtime: Runtime, *, idle_s: float, timeout_s: float, serving: Callable[[], bool]
    ) -> None:
        """Send a canary after `idle_s` without a step, 0 = never. `serving` returns whether the worker accepts requests."""
        self._probe = probe
        self._runtime = runtime
        self._idle_s = idle_s
        self._timeout_s = timeout_s
        self._serving = serving

    async def run(self) -> None:
        """Send canaries until cancelled, or until the engine does not answer and is declared dead."""
        while self._idle_s and not self._runtime.dead.done():
            rest_s = self._idle_s - self._runtime.watchdog.idle_s
            if rest_s > 0 or not self._serving():
                await asyncio.sleep(max(rest_s, min(1.0, self._idle_s / 4)))
                continue
            async with self._runtime.exclusive:
                if self._serving():  # or it was sent to sleep while this waited
                    await self._send()

    async def _send(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                took_s = await self._probe.ask()
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
            log.debug("canary.answered", took_s=round(took_s, 3))


# Warms up an engine with one short generation before its worker registers, so that no request pays for lazy initialisation.

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
