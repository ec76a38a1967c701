"""Prefill on one real vLLM and decode on another, through the engine protocol, with both ways of moving blocks."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import DisaggStyle, EngineConfig, Handover, Output, Role, Sequence
from headrace.workers.errors import UnsupportedByEngine
from tests.engines.conftest import ARGS, DIRECT_TOKENS
from tests.engines.support.remote import RemoteEngine
from tests.engines.test_vllm_adapters import write_adapter

pytestmark = [
    pytest.mark.engine,
    pytest.mark.fault,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

BLOCK = 32
LEASE_S = 8
GREEDY = Sampling(temperature=0.0, max_tokens=DIRECT_TOKENS)
SHORT = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
CONNECTORS = {"push": "NixlPushConnector", "pull": "NixlConnector"}


def ids(seed: int, length: int) -> list[int]:
    """Some prompt of its own."""
    return [(seed * 7919 + n * 31) % 40_000 + 100 for n in range(length)]


class Pair:
    """A prefill side and a decode side."""

    def __init__(self, mode: str, prefill: RemoteEngine, decode: RemoteEngine) -> None:
        self.mode, self.prefill, self.decode = mode, prefill, decode
        self._numbers = itertools.count()

    def sequence(
        self,
        tokens: list[int],
        sampling: Sampling,
        handover: Handover | None,
        name: str | None = None,
        adapter: str | None = None,
    ) -> Sequence:
        name = name or f"q{next(self._numbers)}-1-0"
        return Sequence(
            id=name, token_ids=tokens, prompt_tokens=len(tokens), sampling=sampling, handover=handover, adapter=adapter
        )

    async def offer(
        self, tokens: list[int], sampling: Sampling = GREEDY, *, adapter: str | None = None
    ) -> tuple[str, Mapping[str, Any]]:
        """Compute a prompt on the prefill side: the sequence's id and the parameters."""
        sequence = self.sequence(tokens, sampling, Handover(kind="prefill"), adapter=adapter)
        outputs = await self.prefill.run(sequence)
        assert [output.finish for output in outputs] == ["length"], outputs
        assert outputs[-1].handover is not None
        return sequence.id, outputs[-1].handover

    def take(self, name: str, tokens: list[int], params: Mapping[str, Any] | None, sampling: Sampling = GREEDY) -> Sequence:
        """What the decode side is to be given."""
        return self.sequence(tokens, sampling, Handover(kind="decode", params=params), name)

    async def whole(self, tokens: list[int], sampling: Sampling = GREEDY) -> list[Output]:
        name, params = await self.offer(tokens, sampling)
        return await self.decode.run(self.take(name, tokens, params, sampling))

    async def adapted(self, tokens: list[int], adapter: str) -> list[Output]:
        """As `whole`, of an adapter."""
        name, params = await self.offer(tokens, adapter=adapter)
        return await self.decode.run(self.sequence(tokens, GREEDY, Handover(kind="decode", params=params), name, adapter))

    async def nothing_is_held(self) -> None:
        await self.prefill.until_blocks_used(0)
        await self.decode.until_blocks_used(0)


def emitted(outputs: list[Output]) -> list[int]:
    assert outputs[-1].fault is None, outputs[-1].fault
    return [token for output in outputs for token in output.ids]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["push", "pull"])
async def pair(
    request: pytest.FixtureRequest, model_dir: Path, direct: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    """Depends on `direct` only so that not too many engines are up at the same time.

    One side is as Headrace would start it, the other as an operator who gives the connector himself, for a short lease.
    """
    mode: str = request.param
    short = {
        "kv_connector": CONNECTORS[mode],
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    adapters = {"adapters": {"odd": str(write_adapter(tmp_path_factory.mktemp("adapters") / "odd", model_dir))}}
    sides: list[tuple[Role, dict[str, Any]]] = [
        (Role.PREFILL, {} if mode == "push" else {"kv_transfer_mode": mode}),
        (Role.DECODE, {"kv_transfer_config": short}),
    ]
    async with AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(
                RemoteEngine(
                    EngineConfig(model=str(model_dir), served_name="m", role=role, args=ARGS | adapters | args),
                    environ={"OMP_NUM_THREADS": "1"},
                )
            )
            for role, args in sides
        ]
        yield Pair(mode, *started)


async def test_they_say_that_they_can_work_together(pair: Pair) -> None:
    prefill, decode = pair.prefill.info, pair.decode.info
    assert prefill is not None
    assert decode is not None
    assert prefill.handover == decode.handover
    assert prefill.handover.startswith(f"vllm/{pair.mode}/")
    assert (prefill.lease_s, decode.lease_s) == (30.0, LEASE_S)
    for side in (pair.prefill, pair.decode):
        able = await side.capabilities()
        assert able.disagg is DisaggStyle.PARAMS
        assert able.roles == {Role.AGGREGATED, Role.PREFILL, Role.DECODE}


async def test_the_text_is_that_of_one_vllm_alone(pair: Pair, prompts: list[list[int]], direct: list[list[int]]) -> None:
    assert [emitted(outputs) for outputs in await asyncio.gather(*map(pair.whole, prompts))] == direct
    again = await asyncio.gather(*map(pair.whole, prompts))  # now the decode side has the beginning of each prompt
    assert [emitted(outputs) for outputs in again] == direct
    assert [outputs[0].cached_tokens for outputs in again] == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
    await pair.nothing_is_held()


async def test_a_prompt_of_an_adapter_is_computed_with_it_on_the_other_side(pair: Pair) -> None:
    prompt = ids(900, 3 * BLOCK + 5)
    handed_over = await pair.adapted(prompt, "odd")
    assert handed_over[0].cached_tokens == 0
    alone = emitted(await pair.prefill.run(pair.sequence(prompt, GREEDY, None, adapter="odd")))
    assert emitted(handed_over) == alone
    plain = emitted(await pair.whole(prompt))
    assert plain == emitted(await pair.prefill.run(pair.sequence(prompt, GREEDY, None)))
    assert plain != alone
    await pair.nothing_is_held()


async def test_only_what_the_decode_side_had_counts_as_cached(pair: Pair) -> None:
    first = ids(1, 5 * BLOCK + 7)
    await pair.prefill.run(pair.sequence(first, SHORT, None))  # a full cache on the prefill side is another matter
    assert (await pair.whole(first, SHORT))[0].cached_tokens == 0
    longer = first[: 3 * BLOCK] + ids(2, 4 * BLOCK)
    outputs = await pair.whole(longer, SHORT)
    assert outputs[0].cached_tokens == 3 * BLOCK
    assert emitted(outputs) == emitted(await pair.prefill.run(pair.sequence(longer, SHORT, None)))


async def test_the_prompt_is_computed_whatever_would_end_the_answer(
    pair: Pair, prompts: list[list[int]], direct: list[list[int]]
) -> None:
    first = direct[0][0]
    ending = Sampling(temperature=0.0, max_tokens=9, stop_token_ids=[first])
    assert emitted(await pair.whole(prompts[0], ending)) == [first]
    asking = Sampling(temperature=1.0, max_tokens=9, min_tokens=5, presence_penalty=1.0, logit_bias={2: 100.0})
    name, params = await pair.offer(prompts[0], asking)
    await pair.prefill.release(name, None)
    assert params["remote_num_tokens"] == len(prompts[0])
    await pair.nothing_is_held()


async def test_many_at_once_leave_nothing_behind(pair: Pair) -> None:
    given = [ids(10 + n, 40 + 60 * n) for n in range(6)]
    outputs = await asyncio.gather(*(pair.whole(tokens, SHORT) for tokens in given))
    assert [len(emitted(each)) for each in outputs] == [4] * 6
    assert [each[-1].finish for each in outputs] == ["length"] * 6
    await pair.nothing_is_held()


async def test_blocks_on_offer_are_held_until_either_side_lets_go(pair: Pair) -> None:
    tokens = ids(20, 9 * BLOCK + 1)
    name, _ = await pair.offer(tokens)
    await pair.prefill.until_blocks_used(10)
    begun = time.monotonic()
    await pair.prefill.release(name, None)
    await pair.prefill.until_blocks_used(0)
    name, params = await pair.offer(tokens)
    await pair.prefill.until_blocks_used(10)
    await pair.decode.release(name, params)
    await pair.prefill.until_blocks_used(0)
    assert time.monotonic() - begun < 29, "it was the release, and not the lease of 30 s"
    for side in (pair.prefill, pair.decode):  # nothing (any more)
        await side.release(name, None)
    await pair.decode.release(name, params)
    await pair.decode.release(name, {})


async def test_aborts_free_both_sides(pair: Pair) -> None:
    tokens = ids(21, 900)
    sequence = pair.sequence(tokens, GREEDY, Handover(kind="prefill"))
    await pair.prefill.submit(sequence)
    await pair.prefill.abort([sequence.id])
    await pair.prefill.until_blocks_used(0)
    for pause_s in (0.0, 0.005, 0.05):  # before it begins to fetch, while it does, when it has begun to answer
        name, params = await pair.offer(tokens)
        await pair.decode.submit(pair.take(name, tokens, params, Sampling(temperature=0.0, max_tokens=100, ignore_eos=True)))
        await asyncio.sleep(pause_s)
        await pair.decode.abort([name])
        await pair.nothing_is_held()


async def test_unreadable_parameters_fail_one_sequence_and_not_the_engine(pair: Pair) -> None:
    tokens = ids(22, 3 * BLOCK)
    name, params = await pair.offer(tokens)
    for wrong in (
        {},
        {**params, "remote_host": None},
        {**params, "remote_num_tokens": 4000},
        {**params, "remote_block_ids": []},
    ):
        outputs = await pair.decode.run(pair.take(name, tokens, wrong))
        assert outputs[-1].fault is not None
        assert (outputs[-1].fault.code, outputs[-1].fault.retriable) == ("transfer_failed", True)
    assert emitted(await pair.decode.run(pair.take(name, tokens, params, SHORT)))
    await pair.nothing_is_held()


async def test_one_engine_can_be_either(pair: Pair) -> None:
    await pair.prefill.set_role(Role.DECODE)
    await pair.decode.set_role(Role.PREFILL)
    turned = Pair(pair.mode, pair.decode, pair.prefill)
    tokens = ids(23, 6 * BLOCK)
    outputs = emitted(await turned.whole(tokens, SHORT))
    for side in (pair.prefill, pair.decode):
        await side.set_role(Role.AGGREGATED)
        assert emitted(await side.run(pair.sequence(tokens, SHORT, None))) == outputs
        with pytest.raises(UnsupportedByEngine, match="embedding"):
            await side.set_role(Role.EMBEDDING)
    await turned.nothing_is_held()


async def test_blocks_that_do_not_come_are_a_fault_and_nothing_stays_taken(pair: Pair) -> None:
    """The last one: it kills the prefill side."""
    tokens, other = ids(30, 7 * BLOCK), ids(31, 5 * BLOCK)
    if pair.mode == "push":  # with pull, nothing tells the decode side that the blocks may be others' by now
        name, params = await pair.offer(tokens)
        await pair.prefill.release(name, None)
        await pair.prefill.until_blocks_used(0)
        outputs = await pair.decode.run(pair.take(name, tokens, params))
        assert outputs[-1].fault is not None
        assert outputs[-1].fault.code == "transfer_failed"
        assert "no blocks came" in outputs[-1].fault.message
    name, params = await pair.offer(other)
    await pair.prefill.kill()
    outputs = await pair.decode.run(pair.take(name, other, params))
    assert outputs[-1].fault is not None
    assert (outputs[-1].finish, outputs[-1].fault.code, outputs[-1].fault.retriable) == (None, "transfer_failed", True)
    assert len(emitted(await pair.decode.run(pair.sequence(other, SHORT, None, name)))) == 4  # computed here instead
    await pair.decode.until_blocks_used(0, within_s=60)
