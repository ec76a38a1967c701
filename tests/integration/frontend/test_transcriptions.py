"""The `openai` client's transcriptions and translations against a frontend and a simulated model that hears."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.frontend.media_server import WAV
from tests.support.local_deployment import serving, sim

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "acme/hears"
FILE = ("speech.wav", WAV)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(nats_server: EmbeddedServer) -> AsyncIterator[AsyncOpenAI]:
    async with (
        serving(nats_server, Subjects(f"asr{os.getpid()}"), sim(MODEL)) as running,
        AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


LENGTH = {"max_completion_tokens": 12}


async def test_the_client_gets_text_and_its_tokens(client: AsyncOpenAI) -> None:
    answer = await client.audio.transcriptions.create(model=MODEL, file=FILE, language="en", extra_body=LENGTH)
    assert answer.text
    assert answer.usage is not None
    assert answer.usage.type == "tokens"
    assert answer.usage.output_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def test_the_same_speech_streamed_has_the_same_text(client: AsyncOpenAI) -> None:
    whole = await client.audio.transcriptions.create(model=MODEL, file=FILE, extra_body=LENGTH)
    stream = await client.audio.transcriptions.create(model=MODEL, file=FILE, stream=True, extra_body=LENGTH)
    *pieces, last = [event async for event in stream]
    assert last.type == "transcript.text.done"
    assert last.text == whole.text == "".join(piece.delta for piece in pieces).strip()


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client no longer likes translations
async def test_plain_text_and_translations(client: AsyncOpenAI) -> None:
    text = await client.audio.transcriptions.create(model=MODEL, file=FILE, response_format="text", extra_body=LENGTH)
    assert isinstance(text, str)
    assert text.strip()
    assert (await client.audio.translations.create(model=MODEL, file=FILE, extra_body=LENGTH)).text


async def test_what_cannot_be_told_is_refused_by_name(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'srt' is not supported here") as refused:
        await client.audio.transcriptions.create(model=MODEL, file=FILE, response_format="srt")
    assert refused.value.param == "response_format"
    with pytest.raises(openai.NotFoundError, match="whisper-1"):
        await client.audio.transcriptions.create(model="whisper-1", file=FILE)
