"""Texts that are far too long are told so without being tokenised as a whole."""

from __future__ import annotations

import asyncio
import base64
import gc
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.broker.models.cards import ModelCard
from headrace.frontend.errors import BadRequest, ContextTooLong
from headrace.frontend.http import malloc
from headrace.frontend.http.malloc import give_back
from headrace.frontend.media.loader import MediaLoader
from headrace.frontend.media.parts import MediaPart
from headrace.frontend.pooling import inputs
from headrace.frontend.pooling.inputs import Bounds
from headrace.frontend.prompts.length_guard import LONG, PIECE, in_groups, is_suspicious, least_tokens
from headrace.frontend.prompts.prompt_encoder import LengthLimit, PromptEncoder
from headrace.frontend.prompts.templates import ChatTemplate
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import MODEL, TOKENIZER, FakeIngress, frontend, post


class CountingTokenizer:
    """One token per character; remembers how much it was given."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[str]:
        self.given.append(len(texts[0]))
        return texts


def test_counting_ends_once_it_is_clear() -> None:
    tokenizer: Any = CountingTokenizer()
    assert least_tokens(tokenizer, "x" * (10 * PIECE), enough=PIECE) > PIECE
    assert tokenizer.given == [PIECE, PIECE]


def test_a_text_that_fits_is_counted_to_its_end_and_not_for_more_than_it_has() -> None:
    tokenizer: Any = CountingTokenizer()
    text = "x" * (3 * PIECE + 5)
    assert len(text) - 100 < least_tokens(tokenizer, text, enough=10 * PIECE) <= len(text)


def test_ordinary_prompts_are_not_counted_twice() -> None:
    assert not is_suspicious("x" * PIECE, 512)
    assert not is_suspicious("x" * 8_000_000, 1_000_000)
    assert is_suspicious("x" * 8_000_001, 1_000_000)


@pytest.mark.parametrize("more", [{}, {"truncate_prompt_tokens": 10}])
async def test_an_endless_text_never_reaches_the_tokenizer_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    def whole(self: PromptEncoder, text: str, **options: Any) -> bytes:
        raise AssertionError(f"{len(text)} characters were tokenised")

    monkeypatch.setattr(PromptEncoder, "_ids_of", whole)
    call = await post(
        frontend(FakeIngress()).app, {"model": MODEL, "prompt": "water " * 200_000, **more}, path="/v1/completions"
    )
    assert (call.status, call.error["code"], call.error["param"]) == (400, "context_length_exceeded", "prompt")


async def test_an_endless_message_never_reaches_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(self: ChatTemplate, *_: object, **options: Any) -> str:
        raise AssertionError("it was rendered")

    monkeypatch.setattr(ChatTemplate, "render", render)
    messages = [{"role": "user", "content": "water " * 200_000}]
    call = await post(frontend(FakeIngress()).app, {"model": MODEL, "messages": messages})
    assert (call.status, call.error["code"], call.error["param"]) == (400, "context_length_exceeded", "messages")


def test_texts_are_tokenised_a_few_at_a_time() -> None:
    half = "x" * (LONG // 2)
    assert [len(group) for group in in_groups([half, half, half, "x" * (3 * LONG), "", half])] == [2, 1, 1, 2]
    assert list(in_groups([(half, half), ("a", "b")])) == [[(half, half)], [("a", "b")]]
    assert list(in_groups([])) == []


def test_a_long_text_is_counted_before_it_is_tokenised_even_where_the_context_is_longer() -> None:
    """Two million tokens would take a gigabyte, and a million more characters than that are no suspicious number for them."""
    with ThreadPoolExecutor(1) as pool:
        card = ModelCard(model="m", pool="m-0", context_length=LONG // 2, block_size=16, vocab_size=2000)
        encoder = PromptEncoder(TOKENIZER, card, executor=pool, inline_bytes=100)
        tokenizer: Any = CountingTokenizer()
        encoder._tokenizer = tokenizer
        limit = LengthLimit(context_length=LONG // 2, wanted=1, truncate=None, param="prompt")
        text = "x" * (LONG + 1)
        assert not is_suspicious(text, limit.context_length)
        with pytest.raises(ContextTooLong):
            encoder.encode_now(text, add_special_tokens=False, limit=limit)
        assert max(tokenizer.given) == PIECE


@pytest.mark.parametrize("more", [{}, {"truncate_prompt_tokens": 5}])
def test_an_endless_input_is_not_tokenised_to_be_pooled(more: dict[str, Any]) -> None:
    tokenizer: Any = CountingTokenizer()
    encoder: Any = SimpleNamespace(tokenizer=tokenizer, vocab_size=10)
    bounds = Bounds(context_length=512, purpose="x", param="input", truncate=more.get("truncate_prompt_tokens"))
    with pytest.raises(ContextTooLong):
        inputs._inputs(encoder, ["x" * 5_000_000], bounds)
    with pytest.raises(ContextTooLong):
        inputs._pairs(tokenizer, [("x" * 5_000_000, "y")] * 3, bounds)
    assert tokenizer.given == [PIECE, PIECE]


def test_memory_is_given_back_after_a_long_prompt_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr("headrace.frontend.prompts.prompt_encoder.give_back", lambda: given.append(1))

    async def encode() -> None:
        with ThreadPoolExecutor(1) as pool:
            card = ModelCard(model="m", pool="m-0", context_length=4096, block_size=16, vocab_size=2000)
            encoder = PromptEncoder(TOKENIZER, card, executor=pool, inline_bytes=100)
            limit = LengthLimit(context_length=4096, wanted=1, truncate=None, param="prompt")
            await encoder.encode("water " * 100, add_special_tokens=False, limit=limit)
            assert given == []
            with pytest.raises(ContextTooLong):
                await encoder.encode("x" * (LONG + 1), add_special_tokens=False, limit=limit)
            assert given == [1]

    asyncio.run(encode())


class Held:
    """Stands for what the frames of a refused request hold."""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_refused_request_leaves_nothing_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    held: list[weakref.ref[Held]] = []

    def refuse(self: LengthLimit, tokens: int) -> None:
        something = Held()
        held.append(weakref.ref(something))
        error = ContextTooLong("too long")
        raise error

    monkeypatch.setattr(LengthLimit, "check", refuse)
    gc.disable()
    try:
        text = "water " * 2_000_000
        asked = {"prompt": text} if path == "/tokenize" else {"messages": [{"role": "user", "content": text}]}
        call = await post(frontend(FakeIngress()).app, {"model": MODEL, **asked}, path=path)
        assert call.status == 400
        assert [one() for one in held] == [None]
    finally:
        gc.enable()


async def test_what_was_loaded_for_a_refused_request_is_free_at_once() -> None:
    picture = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(1 << 20)).decode()
    loader = MediaLoader(FrontendSettings(media_max_total_bytes=5 << 19))
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        try:
            await loader.load([MediaPart("image", picture, "p", inline=True)] * 4)
        except BadRequest as error:
            malloc.forget_frames(error)
        else:
            pytest.fail("it was taken")
        async with asyncio.timeout(5):
            while tracemalloc.get_traced_memory()[0] > 1 << 19:  # a thread may still be at the last one
                await asyncio.sleep(0.01)
    finally:
        tracemalloc.stop()
        gc.enable()


def test_giving_memory_back_works_wherever_we_run(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back()
    monkeypatch.setattr(malloc, "_libc", lambda: None)
    malloc.give_back()
    malloc.return_large()
