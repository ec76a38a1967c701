"""Two real vLLMs, prefill and decode apart: the prefill side reads the prefix that the decode side has, the answer included."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineConfig, Handover, Output, Role
from tests.engines.conftest import ARGS
from tests.engines.support.remote import RemoteEngine
from tests.engines.test_vllm_disagg import Pair, emitted, ids

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long_engine,
    pytest.mark.fault,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

BLOCK = 32
SHORT = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
ANSWER = Sampling(temperature=0.0, max_tokens=3 * BLOCK + 4, ignore_eos=True)


class Lending(Pair):
    """A pair in which the decode side lends."""

    async def lend(self, tokens: list[int]) -> Mapping[str, Any]:
        """Lend the whole blocks of a prompt, and a token more: the parameters."""
        sequence = self.sequence(tokens[: (len(tokens) - 1) // BLOCK * BLOCK + 1], SHORT, Handover(kind="lend"))
        outputs = await self.decode.run(sequence)
        assert [output.finish for output in outputs] == ["length"], outputs
        assert outputs[-1].handover is not None
        return outputs[-1].handover

    async def read(self, tokens: list[int], params: Mapping[str, Any]) -> tuple[str, Output]:
        """Compute a prompt on the prefill side, whose beginning is lent."""
        sequence = self.sequence(tokens, SHORT, Handover(kind="prefill", params=params))
        return sequence.id, (await self.prefill.run(sequence))[-1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model_dir: Path) -> AsyncIterator[Lending]:
    async with AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(
                RemoteEngine(
                    EngineConfig(model=str(model_dir), served_name="m", role=role, args=ARGS | {"kv_transfer_mode": "pull"}),
                    environ={"OMP_NUM_THREADS": "1"},
                )
            )
            for role in (Role.PREFILL, Role.DECODE)
        ]
        yield Lending("pull", *started)


async def second_turn(pair: Lending, seed: int) -> tuple[list[int], int]:
    """Answer the first turn of a conversation: the prompt of the second, and how many tokens of it the decode side has."""
    first = ids(seed, 5 * BLOCK + 7)
    answer = emitted(await pair.whole(first, ANSWER))
    known = len(first) + len(answer) - 1  # the last token of an answer is not computed
    return first + answer + ids(seed + 1, 50), known // BLOCK * BLOCK


def read_tokens(output: Output) -> int:
    return int((output.extra or {})["remote_tokens"])


async def test_the_prefill_side_reads_the_first_turn_with_its_answer_and_the_text_is_the_same(pair: Lending) -> None:
    prompt, known = await second_turn(pair, 1)
    await pair.nothing_is_held()
    assert await pair.prefill.control("reset_prefix_cache", {}) == {"result": True}
    name, prefilled = await pair.read(prompt, await pair.lend(prompt[: known + 1]))
    assert prefilled.fault is None, prefilled.fault
    assert (prefilled.cached_tokens, read_tokens(prefilled)) == (0, known + 1)
    outputs = await pair.decode.run(pair.take(name, prompt, prefilled.handover, SHORT))
    assert outputs[0].cached_tokens == known
    alone = emitted(await pair.decode.run(pair.sequence(prompt, SHORT, None)))
    assert emitted(outputs) == alone
    assert emitted(await pair.prefill.run(pair.sequence(prompt, SHORT, None))) == alone, "and what it read is in its cache"
    await pair.nothing_is_held()


async def test_what_the_prefill_side_has_itself_is_not_read(pair: Lending) -> None:
    prompt, known = await second_turn(pair, 11)  # it has computed the first turn's prompt, and not its answer
    _, prefilled = await pair.read(prompt, await pair.lend(prompt[: known + 1]))
    assert prefilled.fault is None, prefilled.fault
    assert prefilled.cached_tokens == 5 * BLOCK
    assert read_tokens(prefilled) == known + 1 - 5 * BLOCK


async def test_blocks_that_may_be_others_by_now_are_not_read(pair: Lending) -> None:
    prompt, known = await second_turn(pair, 21)
    await pair.prefill.control("reset_prefix_cache", {})
    params = await pair.lend(prompt[: known + 1])
    assert time.perf_counter() < params["remote_blocks_expiry_time"] < time.perf_counter() + 30.0
    _, prefilled = await pair.read(prompt, {**params, "remote_blocks_expiry_time": time.perf_counter() - 1.0})
    assert prefilled.fault is not None
    assert prefilled.fault.retriable
    name, params = await pair.offer(prompt, SHORT)  # the engine goes on, and computes it
    alone = emitted(await pair.decode.run(pair.sequence(prompt, SHORT, None)))
    assert emitted(await pair.decode.run(pair.take(name, prompt, params, SHORT))) == alone


async def test_a_lender_that_is_killed_costs_the_prefill_side_no_more_than_this_prompt(pair: Lending) -> None:
    """The last one."""
    prompt, known = await second_turn(pair, 31)
    await pair.prefill.control("reset_prefix_cache", {})
    params = await pair.lend(prompt[: known + 1])
    await pair.decode.kill()
    _, prefilled = await pair.read(prompt, params)
    assert prefilled.fault is not None
    assert prefilled.fault.retriable
    assert len(emitted(await pair.prefill.run(pair.sequence(prompt, SHORT, None)))) == 4
