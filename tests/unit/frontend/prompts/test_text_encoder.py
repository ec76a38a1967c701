"""Two libraries make token ids; whichever does, they are the same ids."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headrace.broker.codec import unpack_u32
from headrace.broker.models.cards import ModelCard
from headrace.frontend.errors import BadRequest, ContextTooLong
from headrace.frontend.http import loop
from headrace.frontend.http.loop import give_back
from headrace.frontend.metrics import Metrics
from headrace.frontend.pooling import jobs
from headrace.frontend.pooling.jobs import Bounds
from headrace.frontend.prompts import text_encoder
from headrace.frontend.prompts.media import MediaLoader
from headrace.frontend.prompts.media_parts import MediaPart
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit, PromptEncoder
from headrace.frontend.prompts.text_encoder import LONG, PIECE, TextEncoder, in_groups, is_suspicious, least_tokens
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import FILES, MODEL, TOKENIZER, FakeIngress, FakeModels, frontend, post
from tests.support.frontend.tokenizers import MAKES, make
from tests.unit.frontend.prompts.test_prompt_cache import TEXTS

LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


def split_by(pattern: str, normalizer: str | None = None) -> bytes:
    """The bundled vocabulary behind another family's way to split texts."""
    made: dict[str, Any] = json.loads(make("SmolLM2"))
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{**SPLIT, "pattern": {"Regex": pattern}}, BYTE_LEVEL]}
    made["normalizer"] = normalizer and {"type": normalizer}
    return json.dumps(made).encode()


FAMILIES = {
    **{name: (lambda name=name: make(name)) for name in MAKES},
    "Llama 3": lambda: split_by(LLAMA_3),
    "Qwen": lambda: split_by(LLAMA_3.replace("{1,3}", ""), "NFC"),
}
needs_fast = pytest.mark.skipif(text_encoder.fastokens is None, reason="fastokens has no wheel for this machine")


@cache
def encoder(family: str) -> TextEncoder:
    made = TextEncoder(FAMILIES[family](), name=family)
    made.use_fast_tokenizer()
    return made


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None)  # the first example loads a tokenizer
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), special=st.booleans())
@example(texts=["It's 12345 o'clock,  WE'LL see\r\n\n\tK ſ ı", "e\u0301 ﬁ Ⅷ <s>", "\x13\x1a 👩‍👩‍👧"], special=False)
def test_ids_are_those_of_the_reference(family: str, texts: list[str], special: bool) -> None:
    ours = encoder(family).encode(texts, special=special)
    reference = encoder(family).reference
    assert list(map(unpack_u32, ours)) == [reference.encode(text, add_special_tokens=special).ids for text in texts]


@needs_fast
@pytest.mark.slow
def test_byte_level_tokenizers_are_fast_and_others_say_why_not() -> None:
    with capture_logs() as logs:
        fast = {family for family in FAMILIES if encoder.__wrapped__(family).fast}
    assert fast == {"SmolLM2", "byte BPE", "byte BPE with prefix space", "odd added tokens", "Llama 3", "Qwen"}
    slow = {log["model"]: log["reason"] for log in logs if log["event"] == "tokenizer.slow"}
    assert slow.keys() == FAMILIES.keys() - fast
    assert "Metaspace" in slow["SentencePiece, first"]


@needs_fast
def test_words_that_the_configuration_calls_special_are_so_for_both() -> None:
    made = TextEncoder(make("byte BPE"), name="m", special_tokens=["hello", "nowhere"])
    before = made.encode(["a hello b"], special=False)
    made.use_fast_tokenizer()
    assert made.fast
    assert made.encode(["a hello b"], special=False) == before
    assert made.reference.token_to_id("hello") in unpack_u32(before[0])


@needs_fast
def test_a_text_that_the_fast_one_refuses_is_encoded_and_counted() -> None:
    """The bundled vocabulary has no token for this byte: `tokenizers` leaves it out, `fastokens` raises."""
    refused = []
    made = TextEncoder(make("SmolLM2"), name="m")
    made.use_fast_tokenizer()
    made.on_refused = lambda: refused.append(1)
    assert unpack_u32(made.encode(["a\x13b"], special=False)[0]) == made.reference.encode("a\x13b").ids
    assert len(refused) == 1
    made.encode(["ab"], special=False)
    assert len(refused) == 1


@needs_fast
@pytest.mark.slow
def test_one_that_understands_the_file_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = text_encoder.fastokens.Tokenizer

    class Misreading:
        """Takes no notice of how the file wants texts to be split."""

        @staticmethod
        def from_json_str(text: str) -> Any:
            return real.from_json_str(json.dumps({**json.loads(text), "pre_tokenizer": BYTE_LEVEL}))

    made = TextEncoder(make("SmolLM2"), name="m")
    monkeypatch.setattr(text_encoder.fastokens, "Tokenizer", Misreading)
    with capture_logs() as logs:
        made.use_fast_tokenizer()
    assert not made.fast
    assert "has other ids for" in logs[0]["reason"]


def test_without_the_fast_library_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_encoder, "fastokens", None)
    made = TextEncoder(make("SmolLM2"), name="m")
    with capture_logs() as logs:
        made.use_fast_tokenizer()
    assert not made.fast
    assert logs[0]["reason"] == "fastokens is not installed"
    assert unpack_u32(made.encode(["Hello"], special=False)[0]) == made.reference.encode("Hello").ids


@needs_fast
async def test_a_loaded_model_becomes_fast_by_itself_and_counts_what_is_refused() -> None:
    models, metrics = FakeModels(), Metrics()
    models.served[MODEL].files = {**FILES, "tokenizer.json": make("SmolLM2")}
    model_cache = ModelCache(models, FrontendSettings(), metrics)
    encoder = (await model_cache.get(MODEL)).encoder
    assert model_cache._speedup is not None
    await model_cache._speedup
    assert encoder._text.fast
    encoder._text.encode(["\x13"], special=False)
    assert b"headrace_frontend_slow_prompts_total 1.0" in metrics.render()
    model_cache.close()


async def test_the_fast_library_can_be_left_out() -> None:
    models = FakeModels()
    models.served[MODEL].files = {**FILES, "tokenizer.json": make("SmolLM2")}
    model_cache = ModelCache(models, FrontendSettings(fast_tokenizer=False))
    encoder = (await model_cache.get(MODEL)).encoder
    assert model_cache._speedup is None
    assert not encoder._text.fast
    model_cache.close()


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
        jobs._inputs(encoder, ["x" * 5_000_000], bounds)
    with pytest.raises(ContextTooLong):
        jobs._pairs(tokenizer, [("x" * 5_000_000, "y")] * 3, bounds)
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
            loop.forget_frames(error)
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
    monkeypatch.setattr(loop, "_libc", lambda: None)
    loop.give_back()
    loop.return_large()
