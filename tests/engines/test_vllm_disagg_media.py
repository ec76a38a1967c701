"""Encode, prefill and decode of prompts with images on three real vLLMs: the answers are those of one that does it all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from headrace.broker.messages.requests import Sampling
from headrace.frontend.prompts.media import content_digest
from headrace.workers.engine import EngineConfig, Handover, Output, Role, Sequence
from tests.engines.support.media_world import ARGS
from tests.engines.support.remote import RemoteEngine
from tests.engines.support.tiny_vision import write_vision_model
from tests.engines.test_vllm_disagg import emitted, ids
from tests.engines.test_vllm_media import png

pytestmark = [
    pytest.mark.engine,
    pytest.mark.fault,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

TOKENS = 12
GREEDY = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@dataclass
class Three:
    encode: RemoteEngine
    prefill: RemoteEngine
    decode: RemoteEngine
    number: int = 0

    def sequence(self, prompt: list[int], *images: tuple[int, bytes]) -> Sequence:
        """Build a sequence of a prompt with images that begin at these tokens of it."""
        assert self.decode.info is not None
        slot = self.decode.info.media["image"]
        whole: list[int] = []
        media = []
        at = 0
        for start, data in images:
            whole += prompt[at:start]
            media.append(
                {
                    "kind": "image",
                    "digest": content_digest(data),
                    "start": len(whole),
                    "length": len(slot.ids),
                    "data": data,
                    "type": "image/png",
                }
            )
            whole += slot.ids
            at = start
        whole += prompt[at:]
        self.number += 1
        return Sequence(id=f"q{self.number}-1-0", token_ids=whole, prompt_tokens=len(whole), sampling=GREEDY, media=media)

    async def apart(self, sequence: Sequence, *, encoded: bool = False) -> list[Output]:
        """Compute the prompt on one engine, and the answer on the other; the images on a third one if `encoded`."""
        records = {}
        if encoded:
            for number, item in enumerate(sequence.media):
                records[number] = await self.encode.encode({"kind": item["kind"], "data": item["data"]})
        asked = msgspec.structs.replace(sequence, handover=Handover(kind="prefill"), embeddings=records)
        prefilled = await self.prefill.run(asked)
        assert [output.finish for output in prefilled] == ["length"], prefilled
        params = prefilled[-1].handover
        assert params is not None
        return await self.decode.run(msgspec.structs.replace(sequence, handover=Handover(kind="decode", params=params)))

    async def alone(self, sequence: Sequence) -> list[Output]:
        """Compute all on the decode engine, which knows nothing of these blocks under another salt."""
        self.number += 1
        name = f"q{self.number}-1-0"
        return await self.decode.run(msgspec.structs.replace(sequence, id=name, cache_salt="alone"))

    async def nothing_is_held(self) -> None:
        """Within 15 s: blocks that nobody has fetched would be held for 30 s."""
        await self.prefill.until_blocks_used(0)
        await self.decode.until_blocks_used(0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Three]:
    folder = write_vision_model(tmp_path_factory.mktemp("vision") / "model", model_dir)
    roles: list[tuple[Role, dict[str, Any]]] = [
        (Role.ENCODE, {}),
        (Role.PREFILL, {"encoders": True}),
        (Role.DECODE, {"encoders": True}),
    ]
    async with AsyncExitStack() as stack:
        started = []
        for role, args in roles:
            config = EngineConfig(model=str(folder), served_name="sees", role=role, args=ARGS | args)
            started.append(await stack.enter_async_context(RemoteEngine(config, environ={"OMP_NUM_THREADS": "1"})))
        encode, prefill, decode = started
        yield Three(encode, prefill, decode)


async def test_they_say_that_they_hand_over_prompts_with_media(three: Three) -> None:
    infos = [side.info for side in (three.prefill, three.decode)]
    assert all(info is not None and info.hands_over_media for info in infos)
    assert len({info.encoder for info in (three.encode.info, *infos) if info is not None}) == 1


@pytest.mark.parametrize("encoded", [False, True], ids=["encoded by the prefill engine", "encoded by a third one"])
async def test_the_answer_is_that_of_one_vllm(three: Three, encoded: bool) -> None:
    number = 100 + 10 * encoded
    asked = [
        three.sequence(ids(number, 7), (3, png(number))),
        three.sequence(ids(number + 1, 80), (0, png(number + 1, (300, 40))), (40, png(number + 2, (20, 90)))),
        three.sequence(ids(number + 2, 90), (70, png(number + 3))),
    ]
    apart = await asyncio.gather(*(three.apart(sequence, encoded=encoded) for sequence in asked))
    alone = [await three.alone(sequence) for sequence in asked]
    assert [emitted(outputs) for outputs in apart] == [emitted(outputs) for outputs in alone]
    assert all(len(emitted(outputs)) == TOKENS for outputs in apart)
    assert len({tuple(emitted(outputs)) for outputs in apart}) == len(asked), "each image is seen"
    assert [outputs[0].prompt_tokens for outputs in apart] == [len(sequence.token_ids) for sequence in asked]
    await three.nothing_is_held()


async def test_another_image_at_the_same_place_gives_another_answer(three: Three) -> None:
    prompt = ids(300, 60)
    first, second = three.sequence(prompt, (30, png(301))), three.sequence(prompt, (30, png(302)))
    assert emitted(await three.apart(first)) != emitted(await three.apart(second))
    assert emitted(await three.apart(three.sequence(prompt, (30, png(301))))) == emitted(await three.alone(first))


async def test_a_resumed_answer_goes_on_behind_its_tokens(three: Three) -> None:
    sequence = three.sequence(ids(400, 50), (20, png(400)))
    whole = emitted(await three.alone(sequence))
    rest = Sampling(temperature=0.0, max_tokens=TOKENS - 5, ignore_eos=True)
    resumed = msgspec.structs.replace(sequence, token_ids=[*sequence.token_ids, *whole[:5]], sampling=rest)
    assert emitted(await three.apart(resumed)) == whole[5:]


async def test_a_damaged_image_fails_on_the_side_that_computes_the_prompt(three: Three) -> None:
    data = png(500)
    sequence = three.sequence(ids(500, 20), (5, data[: len(data) // 2]))
    with pytest.raises(Exception, match="cannot be read"):
        await three.apart(sequence)
    await three.nothing_is_held()
