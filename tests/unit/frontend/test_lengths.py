"""Texts that are far too long are told so without being tokenised as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.lengths import PIECE, is_suspicious, least_tokens
from frontend.templates import ChatTemplate
from frontend.tokenize import PromptEncoder
from tests.unit.frontend.fakes import MODEL, FakeIngress, frontend, post


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
