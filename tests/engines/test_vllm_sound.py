"""Sounds on the real vLLM, through the whole of Headrace in one process, beside the same vLLM asked directly."""

from __future__ import annotations

import base64
import io
import math
import struct
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.frontend.transcriptions import SpeechForm, instruction
from headrace.jetstream.embedded_server import EmbeddedServer
from tests.engines.support.media_world import BLIND, LONG, World, cached, media_world, said, text
from tests.engines.support.tiny_hearing import RATE, write_hearing_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

MODEL = "hears"
BLOCK = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, nats_server: EmbeddedServer) -> AsyncIterator[World]:
    folder = write_hearing_model(tmp_path_factory.mktemp("hearing") / "model", model_dir)
    async with media_world(folder, MODEL, nats_server) as made:
        yield made


def tone(hertz: float, seconds: float = 1.0) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        samples = [int(20_000 * math.sin(2 * math.pi * hertz * n / RATE)) for n in range(int(RATE * seconds))]
        sound.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return out.getvalue()


def audio(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


async def test_it_says_that_it_takes_sounds(world: World) -> None:
    assert set(world.parts.engine.offer.slots) == world.parts.engine.capabilities.media == {"audio"}


@pytest.mark.parametrize(
    "content",
    [
        [audio(tone(440)), text("What is this?")],
        [text("First"), audio(tone(200, 0.4)), text("then"), audio(tone(900, 2.0)), text("and why?")],
        [text(LONG), audio(tone(1500))],
    ],
    ids=["one", "two between texts", "after a long text"],
)
async def test_the_answer_is_vllms_own(world: World, content: list[dict[str, Any]]) -> None:
    prompt, ids, words = await world.directly(*content)
    ours = await world.ask(*content)
    assert ours["choices"][0]["token_ids"] == ids
    assert said(ours) == words
    assert (ours["usage"]["prompt_tokens"], ours["usage"]["completion_tokens"]) == (len(prompt), len(ids))


async def test_a_sound_is_found_in_the_cache_and_another_is_not_taken_for_it(world: World) -> None:
    one, other = tone(300), tone(2500)
    first = await world.ask(audio(one), text(LONG))
    again = await world.ask(audio(one), text(LONG))
    unlike = await world.ask(audio(other), text(LONG))
    assert [cached(answer) for answer in (first, unlike)] == [0, 0]
    assert cached(again) >= 2 * BLOCK
    assert said(again) == said(first) != said(unlike)


async def test_a_transcript_is_what_vllm_says_to_the_sound_and_the_instruction(world: World) -> None:
    sound = tone(520)
    _, ids, words = await world.directly(audio(sound), text(instruction(SpeechForm(), "transcribe")))
    answer = await world.client.post(
        "/v1/audio/transcriptions",
        data={"model": MODEL, "max_completion_tokens": "12"},
        files={"file": ("tone.wav", sound, "audio/wav")},
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"] == words.strip()
    assert answer.json()["usage"]["output_tokens"] == len(ids)
    deaf = await world.client.post("/v1/audio/transcriptions", data={"model": BLIND}, files={"file": ("tone.wav", sound)})
    assert (deaf.status_code, deaf.json()["error"]["param"]) == (400, "model")


async def test_a_sound_that_cannot_be_read_or_is_not_taken_is_a_400_that_names_the_part(world: World) -> None:
    whole = tone(700)
    for model, data in ((MODEL, whole[:20] + b"\0" * 40), (BLIND, whole)):
        answer = await world.post([text("Listen."), audio(data)], model=model)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("messages[0].content[1]")
    assert (await world.ask(audio(whole), text("And this one?")))["usage"]["completion_tokens"] > 0
