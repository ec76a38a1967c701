"""The short generation before a worker registers: what it asks of engines of each role and kind, and what ends the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from headrace.workers.engine import DisaggStyle, Fault, Output, Pooled, PoolItem, Role, Sequence
from headrace.workers.errors import EngineStartFailed, RequestInvalid
from headrace.workers.probes import PREFILL_TOKENS, WARMUP_TOKENS, warm_up
from tests.support.runtime_bench import INFO, FakeEngine

LONG = replace(INFO, context_length=4096)
BEGIN = 7  # the token that prompts begin with


class Tap:
    """What a warm-up needs of the runtime: the engine's outputs come by it."""

    def __init__(self) -> None:
        self.sink: Callable[[list[Output]], None] | None = None

    def tap(self, sink: Callable[[list[Output]], None] | None) -> None:
        self.sink = sink


class Engine(FakeEngine):
    """Answers each sequence at once, unless it is `silent` or has a fault to tell."""

    def __init__(self, style: DisaggStyle = DisaggStyle.NONE) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, disagg=style)
        self.runtime = Tap()
        self.released: list[str] = []
        self.pooled: list[PoolItem] = []
        self.silent = False
        self.fault: Fault | None = None

    async def submit(self, sequence: Sequence) -> None:
        await super().submit(sequence)
        assert self.runtime.sink is not None
        if not self.silent:
            finish = None if self.fault else "length"
            self.runtime.sink([Output("somebody else", [1]), Output(sequence.id, [1], finish=finish, fault=self.fault)])  # type: ignore[arg-type]

    async def release(self, sequence_id: str, params: object) -> None:
        self.released.append(sequence_id)

    async def pool(self, item: PoolItem) -> Pooled:
        if self.refuse is not None:
            raise self.refuse
        self.pooled.append(item)
        return Pooled(b"", 0)


async def warmed(engine: Engine, info: Any = LONG, role: Role = Role.AGGREGATED, timeout_s: float = 10.0) -> Engine:
    runtime = cast("Any", engine.runtime)
    await warm_up(cast("Any", engine), runtime, info, token=BEGIN, role=role, timeout_s=timeout_s)
    assert engine.runtime.sink is None, "requests of clients go to the runtime"
    return engine


@pytest.mark.parametrize("style", list(DisaggStyle))
async def test_an_engine_computes_two_blocks_and_makes_a_few_tokens(style: DisaggStyle) -> None:
    (taken,) = (await warmed(Engine(style))).taken
    assert taken.token_ids[0] == BEGIN
    assert (len(taken.token_ids), taken.prompt_tokens) == (2 * INFO.block_size, 2 * INFO.block_size)
    assert (taken.sampling.max_tokens, taken.sampling.ignore_eos, taken.handover) == (WARMUP_TOKENS, True, None)


async def test_a_prefill_engine_that_offers_blocks_also_offers_those_of_a_long_prompt_and_takes_them_back() -> None:
    engine = await warmed(Engine(DisaggStyle.PARAMS), role=Role.PREFILL)
    plain, offered = engine.taken
    assert plain.handover is None
    assert offered.handover is not None
    assert (offered.handover.kind, len(offered.token_ids)) == ("prefill", PREFILL_TOKENS)
    assert engine.released == [offered.id]


async def test_a_prefill_engine_that_meets_others_in_a_room_computes_a_prompt_with_nobody_in_it() -> None:
    engine = await warmed(Engine(DisaggStyle.RENDEZVOUS), role=Role.PREFILL)
    assert [one.handover for one in engine.taken] == [None]


async def test_no_warm_up_is_longer_than_half_of_the_context() -> None:
    (taken,) = (await warmed(Engine(), replace(INFO, context_length=20))).taken
    assert len(taken.token_ids) == 10


async def test_an_engine_of_vectors_makes_one() -> None:
    engine = await warmed(Engine(), replace(INFO, kinds=("embedding",)))
    assert engine.taken == []
    (item,) = engine.pooled
    assert (item.task, item.token_ids[0]) == ("embed", BEGIN)


async def test_a_warm_up_that_fails_ends_the_start_with_the_reason() -> None:
    engine = Engine()
    engine.fault = Fault("engine_error", "no kernel for this", retriable=True)
    with pytest.raises(EngineStartFailed, match="no kernel for this"):
        await warmed(engine)
    assert engine.runtime.sink is None
    vectors = Engine()
    vectors.refuse = RequestInvalid("no such layer")
    with pytest.raises(EngineStartFailed, match="no such layer"):
        await warmed(vectors, replace(INFO, kinds=("embedding",)))


async def test_a_warm_up_that_is_not_answered_ends_the_start() -> None:
    engine = Engine()
    engine.silent = True
    with pytest.raises(EngineStartFailed, match=r"not answered within 0\.05 s"):
        await warmed(engine, timeout_s=0.05)
    assert engine.runtime.sink is None
