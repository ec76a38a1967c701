"""Nothing that the event loop does for a request grows with its prompt: long ones are read, encoded and hashed in threads."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from types import FrameType
from typing import Any

import msgspec
import pytest

from tests.support.frontend.fakes import MODEL, FakeIngress, frontend, post

SHORT, LONG = 20_000, 100_000  # tokens; the tokenizer of the tests makes one of each byte
TURNS = 40
MOST = (LONG - SHORT) / 100  # calls more: a pause for each slice, and nothing for each block or word


def conversation(tokens: int) -> tuple[str, dict[str, Any]]:
    turns = [{"role": "user", "content": "What is the weather like in Rome? " * (tokens // 34 // TURNS)}] * TURNS
    return "/v1/chat/completions", {"model": MODEL, "max_tokens": 1, "messages": turns}


def message(tokens: int) -> tuple[str, dict[str, Any]]:
    turn = {"role": "user", "content": "rain " * (tokens // 5)}
    return "/v1/chat/completions", {"model": MODEL, "max_tokens": 1, "messages": [turn]}


def ids(tokens: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": MODEL, "max_tokens": 1, "prompt": [65, 66, 67, 68] * (tokens // 4)}


async def calls_on_the_loop(kind: Any, tokens: int, **settings: Any) -> Counter[str]:
    """The calls in the thread of the event loop for one such request, by the function that makes or is them."""
    ingress = FakeIngress()
    served = ingress.models.served[MODEL]
    card = msgspec.structs.replace(served.card, context_length=1_000_000)
    ingress.models.served[MODEL] = dataclasses.replace(served, card=card)
    app = frontend(ingress, **settings).app
    path, body = kind(tokens)
    assert (await post(app, kind(200)[1], path=path)).status == 200  # loads the model
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _given: Any) -> None:
        if event in ("call", "c_call"):
            calls[f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}"] += 1

    sys.setprofile(count)  # of this thread only
    try:
        call = await post(app, body, path=path)
    finally:
        sys.setprofile(None)
    assert call.status == 200, call.body
    return calls


@pytest.mark.parametrize("kind", [conversation, message, ids])
async def test_the_event_loop_does_no_more_for_a_long_prompt(kind: Any) -> None:
    short, long = [await calls_on_the_loop(kind, tokens) for tokens in (SHORT, LONG)]
    assert long.total() - short.total() <= MOST, (long - short).most_common(10)


@pytest.mark.parametrize("kind", [conversation, message, ids])
async def test_a_frontend_that_works_on_prompts_in_the_event_loop_is_noticed(kind: Any) -> None:
    short, long = [await calls_on_the_loop(kind, tokens, inline_prompt_bytes=10**9) for tokens in (SHORT, LONG)]
    assert long.total() - short.total() > 2 * MOST
