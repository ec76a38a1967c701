"""Transcriptions over a fake ingress: what a hearing model is asked, what comes back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headrace.broker.errors import JobFailed
from headrace.broker.models.cards import MediaSlot
from headrace.frontend.transcriptions import SpeechForm, instruction
from tests.support.frontend.answer_parts import content, say_parts, thought
from tests.support.frontend.fakes import CARD, FILES, MODEL, Call, FakeIngress, FakeServed, frontend, row, say
from tests.support.frontend.media_server import PNG, WAV
from tests.unit.frontend.media.test_media import IMAGE, TOKENIZER

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def hearing(ingress: FakeIngress) -> FakeIngress:
    card = msgspec.structs.replace(CARD, media={"audio": MediaSlot("<|img|>", IMAGE, 3)})
    ingress.models.served = {MODEL: FakeServed(card, {**FILES, "tokenizer.json": TOKENIZER})}
    return ingress


def form(fields: list[tuple[str, str]], sound: bytes | None) -> bytes:
    parts = [f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields]
    if sound is not None:
        head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
        parts.append(head + sound + b"\r\n")
    return b"".join(parts) + b"--b--\r\n"


async def send(ingress: FakeIngress, *fields: tuple[str, str], sound: bytes | None = WAV, path: str = TRANSCRIPTIONS) -> Call:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    return await Call(frontend(ingress).app, path, form(list(fields), sound), headers=headers).run()


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS])
async def test_a_file_becomes_a_chat_with_a_sound_and_the_answer_its_text(path: str) -> None:
    ingress = hearing(FakeIngress(say(" The sea", " is calm. ", prompt_tokens=400)))
    call = await send(ingress, ("model", MODEL), path=path)
    assert (call.status, call.headers["content-type"]) == (200, "application/json"), call.body
    usage = {"type": "tokens", "input_tokens": 400, "output_tokens": 2, "total_tokens": 402}
    assert call.json() == {"text": "The sea is calm.", "usage": usage}
    [job] = ingress.jobs
    [item] = job.generation.media
    assert (item["kind"], item["data"]) == ("audio", WAV)
    assert job.generation.sampling.temperature == 0.0


async def test_the_only_model_need_not_be_named() -> None:
    assert (await send(hearing(FakeIngress()))).status == 200


async def test_plain_text_is_plain_text() -> None:
    call = await send(hearing(FakeIngress(say(" hello "))), ("response_format", "text"))
    assert (call.headers["content-type"], call.body) == ("text/plain; charset=utf-8", b"hello\n")
    assert call.headers["content-length"] == "6"


async def test_a_stream_has_the_pieces_and_then_the_whole() -> None:
    call = await send(hearing(FakeIngress(say("The", " sea"))), ("stream", "true"))
    assert call.headers["content-type"].startswith("text/event-stream")
    *pieces, last = call.events()
    assert pieces == [{"type": "transcript.text.delta", "delta": text} for text in ("The", " sea")]
    assert (last["type"], last["text"], last["usage"]["output_tokens"]) == ("transcript.text.done", "The sea", 2)


async def test_a_stream_that_fails_has_an_error_in_place_of_the_whole() -> None:
    failed = JobFailed("engine gone")
    call = await send(hearing(FakeIngress(lambda job: [[row("The")], failed])), ("stream", "true"))
    assert [event.get("type") for event in call.events()] == ["transcript.text.delta", None]
    assert "engine gone" in call.events()[-1]["error"]["message"]


async def test_reasoning_is_no_speech() -> None:
    call = await send(hearing(FakeIngress(say_parts([thought("hm")], [content("hello")]))))
    assert call.json()["text"] == "hello"


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS])
async def test_a_model_that_hears_nothing_is_named(path: str) -> None:
    ingress = FakeIngress()
    call = await send(ingress, ("model", MODEL), path=path)
    assert (call.status, call.error["code"], call.error["param"]) == (400, "unsupported_media", "model")
    assert f"{MODEL!r} takes no sounds" in call.error["message"]
    assert not ingress.jobs


async def test_an_unknown_model_is_a_404() -> None:
    call = await send(hearing(FakeIngress()), ("model", "whisper-9"))
    assert (call.status, call.error["code"]) == (404, "model_not_found")
    assert "whisper-9" in call.error["message"]


REFUSED: list[tuple[list[tuple[str, str]], str, str]] = [
    ([("response_format", "srt")], "response_format", "'srt' is not supported here: use json or text"),
    ([("response_format", "mp3")], "response_format", "mp3"),
    ([("timestamp_granularities[]", "word"), ("response_format", "text")], "timestamp_granularities", "not supported"),
    ([("include[]", "logprobs")], "include", "not supported"),
    ([("chunking_strategy", "auto")], "chunking_strategy", "as a whole"),
    ([("temperature", "warm")], "temperature", "temperature"),
    ([("temperature", "1.5")], "temperature", "temperature"),
    ([("stream", "maybe")], "stream", "stream"),
    ([("language", "x")], "language", "language"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
async def test_a_wrong_field_is_named(fields: list[tuple[str, str]], param: str, words: str) -> None:
    ingress = hearing(FakeIngress())
    call = await send(ingress, *fields)
    assert (call.status, call.error["param"]) == (400, param), call.body
    assert words in call.error["message"]
    assert not ingress.jobs


async def test_a_language_is_no_parameter_of_translations() -> None:
    call = await send(hearing(FakeIngress()), ("language", "de"), path=TRANSLATIONS)
    assert (call.status, call.error["param"]) == (400, "language")


@pytest.mark.parametrize("sound", [None, b"", b"no sound at all", PNG])
async def test_a_file_that_is_no_sound_is_named(sound: bytes | None) -> None:
    call = await send(hearing(FakeIngress()), sound=sound)
    assert (call.status, call.error["param"]) == (400, "file"), call.body
    assert "messages[" not in call.error["message"]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("application/json", (415, "unsupported_media_type")),
        ("multipart/form-data", (400, "malformed_form")),
        ("", (415, "unsupported_media_type")),
    ],
)
async def test_a_body_that_is_no_form_is_refused(kind: str, answer: tuple[int, str]) -> None:
    app = frontend(hearing(FakeIngress())).app
    call = await Call(app, TRANSCRIPTIONS, {"model": MODEL}, headers={"content-type": kind}).run()
    assert (call.status, call.error["code"]) == answer


async def test_a_form_that_ends_too_soon_is_a_400() -> None:
    body = form([("model", MODEL)], WAV)[:-10]
    headers = {"content-type": "multipart/form-data; boundary=b"}
    call = await Call(frontend(hearing(FakeIngress())).app, TRANSCRIPTIONS, body, headers=headers).run()
    assert (call.status, call.error["code"]) == (400, "malformed_form")


async def test_a_sound_full_of_brackets_is_no_nested_json() -> None:
    sound = WAV + b"[" * 100_000
    assert (await send(hearing(FakeIngress()), sound=sound)).status == 200


def test_the_instruction_has_the_language_and_the_prompt() -> None:
    told: Any = SpeechForm(language="de", prompt="Ein Brief.")
    assert "The language is de." in instruction(told, "transcribe")
    assert instruction(told, "transcribe").endswith("\nEin Brief.")
    assert "English" in instruction(SpeechForm(), "translate")
    assert json.dumps(instruction(SpeechForm(), "transcribe")).isascii()
