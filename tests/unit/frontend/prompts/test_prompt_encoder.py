"""From messages, text and ids to prompts: off the event loop when they are long, and as long as they may be."""

from __future__ import annotations

import asyncio
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer

from headrace.broker.codec import unpack_u32
from headrace.broker.models.cards import ModelCard
from headrace.frontend.http.bodies import INLINE_BYTES, decode_request, kinds_of
from headrace.frontend.metrics import Metrics
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit, PromptEncoder
from headrace.frontend.prompts.templates import ChatTemplate
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import MODEL, TOKENIZER, FakeIngress, FakeModels, frontend, post
from tests.support.frontend.tokenizers import make

CARD = ModelCard(model="m", pool="m-0", context_length=1_000_000, block_size=4, vocab_size=257)


def limit(**changes: Any) -> LengthLimit:
    return LengthLimit(**{"context_length": 1_000_000, "wanted": 1, "truncate": None, "param": "prompt", **changes})


@pytest.fixture
def encoder() -> PromptEncoder:
    return PromptEncoder(TOKENIZER, CARD, executor=ThreadPoolExecutor(1, thread_name_prefix="pool"), inline_bytes=100)


def threads_of(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that call this method, from now on."""
    seen: list[str] = []
    method = getattr(owner, name)

    def watched(*given: Any, **options: Any) -> Any:
        seen.append(threading.current_thread().name)
        return method(*given, **options)

    monkeypatch.setattr(owner, name, watched)
    return seen


async def test_long_prompts_are_worked_on_in_threads(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threads_of(PromptEncoder, "_prompt", monkeypatch)
    for size in (100, 101):
        prompt = await encoder.encode("a" * size, add_special_tokens=False, limit=limit())
        assert prompt.tokens == size
        assert (await encoder.take_ids(unpack_u32(prompt.packed), limit=limit())) == prompt
        assert await encoder.text_of(prompt) == "a" * size
    here = threading.current_thread().name
    assert seen == [here, here, "pool_0", "pool_0"]


async def test_many_short_prompts_let_others_have_their_turn(encoder: PromptEncoder) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count())
        for _ in range(20):
            await encoder.encode("a" * 50, add_special_tokens=False, limit=limit())
        counting.cancel()
    assert turns >= 5


async def test_long_conversations_are_rendered_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threads_of(ChatTemplate, "render", monkeypatch)
    model_cache = ModelCache(FakeModels(), FrontendSettings(inline_prompt_bytes=100), Metrics())
    model = await model_cache.get(MODEL)
    short, long = ({"role": "user", "content": "a" * size} for size in (20, 100))
    assert await model.render([short], size=100) == "<user>" + "a" * 20 + "</s><assistant>"
    assert await model.render([long], size=101, add_generation_prompt=False) == "<user>" + "a" * 100 + "</s>"
    here = threading.current_thread().name
    assert [name == here for name in seen] == [True, False]
    model_cache.close()


async def test_the_memory_can_be_turned_off() -> None:
    metrics = Metrics()
    model_cache = ModelCache(FakeModels(), FrontendSettings(inline_prompt_bytes=8, prompt_cache_bytes=0), metrics)
    encoder = (await model_cache.get(MODEL)).encoder
    prompt = await encoder.encode("</s>abcdefgh</s>x", add_special_tokens=False, limit=limit())
    assert prompt.tokens == 11
    assert 'kind="encoded"} 0.0' in metrics.render().decode()
    model_cache.close()


def test_words_the_configuration_calls_special_are_found_whole() -> None:
    with ThreadPoolExecutor(1) as pool:
        plain, special = (
            PromptEncoder(make("byte BPE"), CARD, executor=pool, inline_bytes=8, special_tokens=names)
            for names in ((), ("hell", "unheard of", "<s>"))
        )
        ids = [unpack_u32(e.encode_now("xhellox", add_special_tokens=False, limit=limit()).packed) for e in (plain, special)]
    hell = Tokenizer.from_str(make("byte BPE").decode()).token_to_id("hell")
    assert hell not in ids[0]
    assert ids[1].count(hell) == 1


class SlowToDecode:
    """Stands for a decoder; remembers who called it."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def decode(self, body: bytes) -> int:
        self.threads.append(threading.current_thread().name)
        return len(body)


async def test_long_bodies_are_decoded_in_one_thread() -> None:
    decoder: Any = SlowToDecode()
    short, long = b"x" * 1000, b"x" * (INLINE_BYTES + 1)
    assert await asyncio.gather(*(decode_request(decoder, body) for body in (short, long, long))) == [
        1000,
        *[INLINE_BYTES + 1] * 2,
    ]
    assert decoder.threads == [threading.current_thread().name, *["decode_0"] * 2]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("count", [3, 5000])
async def test_long_conversations_are_translated_in_threads(monkeypatch: pytest.MonkeyPatch, path: str, count: int) -> None:
    module = "openai.tokens_api" if path == "/tokenize" else "openai.chat"
    seen = threads_of(importlib.import_module(f"headrace.frontend.{module}"), "plain_messages", monkeypatch)
    messages = [{"role": "user", "content": "What is the weather like?"}] * count
    body = {"model": MODEL, "max_tokens": 4, "messages": messages}
    if path == "/v1/responses":
        body = {"model": MODEL, "input": messages}
    await post(frontend(FakeIngress()).app, body, path=path)
    assert len(seen) == 1
    assert (seen[0] == threading.current_thread().name) == (count == 3)


async def test_kinds_in_a_long_list_are_found_with_pauses() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert await kinds_of([1] * 200_000 + ["a"]) == {int, str}
    counting.cancel()
    assert turns > 2
