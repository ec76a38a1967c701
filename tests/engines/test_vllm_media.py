"""Images on the real vLLM, through the whole of Headrace in one process, beside the same vLLM asked directly."""

from __future__ import annotations

import asyncio
import base64
import io
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.blocks import MediaSpan, block_chain
from headrace.broker.messages.requests import Sampling
from headrace.frontend.prompts.media import content_digest
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.workers.engine import Sequence
from tests.engines.support.media_world import BLIND, LONG, World, cached, media_world, said, text
from tests.engines.support.tiny_vision import IMAGE_TOKENS, write_vision_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

MODEL = "sees"
BLOCK = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, nats_server: EmbeddedServer) -> AsyncIterator[World]:
    folder = write_vision_model(tmp_path_factory.mktemp("vision") / "model", model_dir)
    async with media_world(folder, MODEL, nats_server) as made:
        yield made


def png(seed: int, size: tuple[int, int] = (80, 60)) -> bytes:
    from PIL import Image

    width, height = size
    out = io.BytesIO()
    noise = bytes((seed * 97 + n * n * 31 + n * (seed + 3)) % 256 for n in range(width * height * 3))
    Image.frombytes("RGB", size, noise).save(out, "PNG")
    return out.getvalue()


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def spans(world: World, prompt: list[int], *images: bytes) -> list[MediaSpan]:
    """Where the images lie in a prompt as the ingress has it."""
    ids = world.parts.engine.offer.slots["image"].ids
    starts = [at for at in range(len(prompt)) if prompt[at : at + len(ids)] == ids]
    assert len(starts) == len(images)
    return [MediaSpan(start, len(ids), content_digest(data)) for start, data in zip(starts, images, strict=True)]


async def test_it_says_what_an_image_is_in_a_prompt(world: World) -> None:
    slot = world.parts.engine.offer.slots["image"]
    assert set(world.parts.engine.offer.slots) == world.parts.engine.capabilities.media == {"image"}
    assert (slot.text, slot.tokens, len(slot.ids)) == ("<image>", IMAGE_TOKENS, IMAGE_TOKENS)
    assert slot.ids.count(slot.token) == IMAGE_TOKENS - 3


@pytest.mark.parametrize(
    "content",
    [
        [image(png(1)), text("What is this?")],
        [text("First"), image(png(2, (300, 40))), text("then"), image(png(3, (20, 90))), text("and why?")],
        [image(png(4)), image(png(4)), text("Are they the same?")],
        [text(LONG), image(png(5))],
    ],
    ids=["one", "two between texts", "one twice", "after a long text"],
)
async def test_the_answer_is_vllms_own(world: World, content: list[dict[str, Any]]) -> None:
    prompt, ids, words = await world.directly(*content)
    ours = await world.ask(*content)
    assert ours["prompt_token_ids"] == prompt
    assert ours["choices"][0]["token_ids"] == ids
    assert said(ours) == words
    usage = ours["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(ids))


async def test_an_image_is_found_in_the_cache_and_another_is_not_taken_for_it(world: World) -> None:
    one, other = png(10), png(11)
    first = await world.ask(image(one), text(LONG))
    again = await world.ask(image(one), text(LONG))
    unlike = await world.ask(image(other), text(LONG))
    assert [cached(answer) for answer in (first, unlike)] == [0, 0]
    assert cached(again) >= 2 * BLOCK
    assert said(again) == said(first) != said(unlike)
    assert said(unlike) == (await world.directly(image(other), text(LONG)))[2]


async def test_the_names_of_blocks_are_those_of_the_ingress(world: World) -> None:
    one, other = png(20), png(21)
    answer = await world.ask(
        text("Look at these twenty words before the picture so that it crosses."), image(one), image(other), text(LONG)
    )
    prompt = answer["prompt_token_ids"]
    placed = spans(world, prompt, one, other)
    assert any(span.start // BLOCK != (span.start + span.length - 1) // BLOCK for span in placed), "one lies across two blocks"
    chain = block_chain(prompt, BLOCK, media=placed)
    (translator,) = [t for t in world.parts.translators if t.block_size == BLOCK]
    async with asyncio.timeout(30):
        while not set(chain) <= set(translator.device):
            await asyncio.sleep(0.01)
    assert not set(block_chain(prompt, BLOCK)[1:]) & set(translator.device), "their names have the images in them"
    assert translator.anomalies.unplaced == translator.anomalies.orphans == 0


async def test_many_who_bring_the_same_new_image_at_once_are_all_answered(world: World) -> None:
    shown = image(png(30))
    answers = await asyncio.gather(*(world.ask(shown, text(f"Number {n}?")) for n in range(6)))
    assert all(answer["usage"]["completion_tokens"] > 0 for answer in answers)
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1


def sequence(
    name: str, prompt: list[int], data: bytes, span: MediaSpan, emitted: list[int], most: int, **sampling: Any
) -> Sequence:
    """A prompt with one image."""
    place = {"start": span.start, "length": span.length}
    return Sequence(
        id=name,
        token_ids=prompt + emitted,
        prompt_tokens=len(prompt),
        sampling=Sampling(temperature=0.0, max_tokens=most, ignore_eos=True, **sampling),
        media=[{"kind": "image", "digest": content_digest(data), "type": "image/png", "data": data, **place}],
    )


async def test_an_answer_goes_on_after_what_was_emitted_and_the_prompt_counts_as_before(world: World) -> None:
    data = png(40)
    answer = await world.ask(image(data), text("Say more."), ignore_eos=True)
    prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    (span,) = spans(world, prompt, data)
    outputs = await world.submit(sequence("resumed-1-0", prompt, data, span, ids[:5], 7))
    assert outputs[-1].fault is None
    assert [token for output in outputs for token in output.ids] == ids[5:]
    assert outputs[0].prompt_tokens == len(prompt)


async def test_where_only_vllm_knows_how_long_an_image_is_it_tells(world: World) -> None:
    data = png(41)
    answer = await world.ask(image(data), text("How long are you?"), ignore_eos=True)
    prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    (span,) = spans(world, prompt, data)
    token = world.parts.engine.offer.slots["image"].token
    short = [*prompt[: span.start], token, *prompt[span.start + span.length :]]
    outputs = await world.submit(sequence("short-1-0", short, data, MediaSpan(span.start, 1, 0), [], 12))
    assert outputs[-1].fault is None
    assert [token for output in outputs for token in output.ids] == ids
    assert outputs[0].prompt_tokens == len(prompt)


async def test_an_image_of_a_request_that_vllm_refused_is_there_for_the_next(world: World) -> None:
    """vLLM's front has processed it by then and takes it for known, while its core has never had it."""
    data, shown = png(42), png(43)
    answer = await world.ask(image(shown), text("Once more?"))
    prompt = answer["prompt_token_ids"]
    (span,) = spans(world, prompt, shown)
    bad = sequence("bad-1-0", prompt, data, span, [], 4, logit_bias={10**6: 1.0})
    refused = (await world.submit(bad))[-1].fault
    assert refused is not None
    assert "logit_bias" in refused.message
    outputs = await world.submit(sequence("good-1-0", prompt, data, span, [], 4))
    assert (outputs[-1].fault, outputs[-1].finish) == (None, "length")


@pytest.mark.parametrize("damage", ["cut off", "empty of pixels"])
async def test_a_damaged_image_is_a_400_that_names_the_part(world: World, damage: str) -> None:
    whole = png(50)
    broken = whole[: len(whole) // 2] if damage == "cut off" else whole[:8] + b"\0" * 40
    answer = await world.post([text("Two pictures."), image(whole), image(broken)])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[2].image_url.url"
    assert "cannot be read" in error["message"]
    assert (await world.ask(image(whole), text("And this one?")))["usage"]["completion_tokens"] > 0


async def test_images_that_would_unpack_to_too_much_are_refused_before_that(world: World) -> None:
    size = (10_000).to_bytes(4, "big")
    chunks = (b"IHDR" + size + size + b"\x08\x02\0\0\0", b"IDAT" + zlib.compress(b"\0" * 10))
    huge = png(1)[:8] + b"".join((len(c) - 4).to_bytes(4, "big") + c + zlib.crc32(c).to_bytes(4, "big") for c in chunks)
    answer = await world.post([image(huge), image(huge), text("How many pixels?")])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert "pixels" in error["message"]


async def test_what_a_model_does_not_take_is_a_400_that_names_the_part(world: World) -> None:
    film = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAAGGZ0eXBpc29t"}}
    for model, content, kind in ((MODEL, film, "video"), (BLIND, image(png(51)), "image")):
        answer = await world.post([text("Look."), content], model=model)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_media", "messages[0].content[1].type")
        assert f"takes no {kind} parts" in error["message"]
