"""Prefill on one real SGLang and decode on another: a rendezvous over NIXL, and sides that wait for one that never comes."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import DisaggStyle, EngineConfig, Handover, Output, Role, Sequence
from tests.engines.support.remote import RemoteEngine
from tests.engines.support.sglang_args import ARGS, needs_sglang

pytestmark = [
    needs_sglang,
    pytest.mark.engine,
    pytest.mark.long_engine,  # `make test` has a deployment of two such engines: test_sglang_served_disagg.py
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # SGLang and torch warn about themselves
]

GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
WAIT_S = 20  # of either side for the other one: SGLang's own time-outs, which are 300 s unless they are set
START_LATE_S = 30.0
HELD_S = 45.0  # a decode side keeps for 30 s what a silent prefill side might still write into
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(WAIT_S),
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(WAIT_S),
}


def ids(seed: int, length: int) -> list[int]:
    """Some prompt of its own."""
    return [(seed * 7919 + n * 31) % 40_000 + 100 for n in range(length)]


def tokens(outputs: list[Output]) -> list[int]:
    assert outputs[-1].fault is None, outputs[-1].fault
    return [token for output in outputs for token in output.ids]


class Pair:
    """A prefill side and a decode side."""

    def __init__(self, prefill: RemoteEngine, decode: RemoteEngine) -> None:
        self.prefill, self.decode = prefill, decode
        self._numbers = itertools.count()

    def sequences(self, prompt: list[int], **options: Any) -> tuple[Sequence, Sequence]:
        """A sequence for each side, in one room."""
        assert self.prefill.info is not None
        name, room = f"q{next(self._numbers)}-1-0", secrets.randbits(62) | 1
        made = Sequence(id=name, token_ids=prompt, prompt_tokens=len(prompt), sampling=GREEDY, **options)
        peer = self.prefill.info.address
        return (
            msgspec.structs.replace(
                made, sampling=Sampling(temperature=0.0, max_tokens=1), handover=Handover(kind="prefill", room=room)
            ),
            msgspec.structs.replace(made, handover=Handover(kind="decode", room=room, peer=peer)),
        )

    async def handed_over(self, prompt: list[int], **options: Any) -> list[Output]:
        """What the decode side answers with blocks of the prefill side."""
        there, here = self.sequences(prompt, **options)
        await asyncio.gather(self.prefill.submit(there), self.decode.submit(here))
        given, answer = await asyncio.gather(self.prefill.end(there.id), self.decode.end(here.id))
        assert tokens(given) == tokens(answer)[:1], "the prefill side's token is the answer's first"
        return answer

    async def local(self, prompt: list[int], **options: Any) -> list[Output]:
        """What the decode side answers by itself."""
        name = f"l{next(self._numbers)}-1-0"
        return await self.decode.run(Sequence(id=name, token_ids=prompt, prompt_tokens=len(prompt), sampling=GREEDY, **options))

    async def nothing_is_held(self) -> None:
        """Wait until neither side has a sequence, or pages that may still be written into: SGLang clears its cache then."""
        async with asyncio.timeout(HELD_S):
            for side in (self.prefill, self.decode):
                while not (await side.control("reset_prefix_cache", {}))["result"]:
                    await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model_dir: Path) -> AsyncIterator[Pair]:
    def engine(role: Role) -> RemoteEngine:
        config = EngineConfig(model=str(model_dir), served_name="smollm2", role=role, args=ARGS)
        return RemoteEngine(config, engine="sglang", environ=ENVIRON)

    async with AsyncExitStack() as stack:
        prefill, decode = engine(Role.PREFILL), engine(Role.DECODE)
        stack.push_async_callback(prefill.kill)
        await asyncio.gather(prefill.__aenter__(), stack.enter_async_context(decode))
        yield Pair(prefill, decode)


async def test_the_two_fit_and_only_one_has_an_address(pair: Pair) -> None:
    assert pair.prefill.info is not None
    assert pair.decode.info is not None
    assert pair.prefill.info.handover == pair.decode.info.handover != ""
    assert (bool(pair.prefill.info.address), pair.decode.info.address) == (True, "")
    able = await pair.decode.capabilities()
    assert (able.disagg, able.roles) == (DisaggStyle.RENDEZVOUS, frozenset({Role.DECODE}))


@pytest.mark.parametrize("length", [40, 200])
async def test_a_prompt_that_is_computed_elsewhere_has_the_same_answer(pair: Pair, length: int) -> None:
    prompt = ids(length, length)
    answer = tokens(await pair.handed_over(prompt))
    assert len(answer) == GREEDY.max_tokens
    assert answer == tokens(await pair.local(prompt, cache_salt="afresh"))


async def test_a_decode_side_whose_prefill_side_never_comes_ends_with_a_failed_transfer(pair: Pair) -> None:
    prompt = ids(301, 200)
    _, here = pair.sequences(prompt)
    await pair.decode.submit(here)
    (output,) = await pair.decode.end(here.id, WAIT_S + START_LATE_S)
    assert output.fault is not None
    assert (output.fault.code, output.fault.retriable) == ("transfer_failed", True)
    assert tokens(await pair.local(prompt)) == tokens(await pair.handed_over(prompt, cache_salt="afresh"))
    await pair.nothing_is_held()


async def test_a_prefill_side_whose_decode_side_never_comes_ends_with_a_retriable_fault(pair: Pair) -> None:
    prompt = ids(302, 200)
    there, _ = pair.sequences(prompt)
    await pair.prefill.submit(there)
    output = (await pair.prefill.end(there.id, WAIT_S + START_LATE_S))[-1]
    assert output.fault is not None
    assert output.fault.retriable
    await pair.nothing_is_held()


@pytest.mark.parametrize("waits", ["prefill", "decode"])
async def test_a_side_that_is_told_to_stop_waiting_holds_nothing(pair: Pair, waits: str) -> None:
    there, here = pair.sequences(ids(303, 200))
    side, waiting = (pair.prefill, there) if waits == "prefill" else (pair.decode, here)
    await side.submit(waiting)
    await asyncio.sleep(1.0)  # until it waits; one that does not yet is no easier to stop
    await side.abort([waiting.id])
    await pair.nothing_is_held()
    prompt = ids(304, 100)
    assert len(tokens(await pair.handed_over(prompt))) == GREEDY.max_tokens
