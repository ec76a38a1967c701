"""What is remembered of earlier prompts changes no prompt."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.broker.blocks import block_chain
from headrace.broker.codec import pack_u32, pack_u64, unpack_u32
from headrace.broker.models.cards import ModelCard
from headrace.frontend.metrics import Metrics
from headrace.frontend.prompts.prompt_encoder import ByteLru, LengthLimit, PromptCache, PromptEncoder
from headrace.frontend.prompts.text_encoder import SplitPoints, cut_tokens
from tests.support.frontend.tokenizers import MAKES, SPECIAL, make

LIMIT = LengthLimit(context_length=1_000_000, wanted=1, truncate=None, param="prompt")
CARD = ModelCard(model="m", pool="m-0", context_length=1_000_000, block_size=4)
ODD = ("<l>", "<r>", "<w>", "<n>", "<ab>", "b><c", "<c>", " <d>", "<d>", "  ", "<f>", "<f>g", "xx", "<ok>")
NO_SURROGATES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
BITS = st.one_of(
    st.sampled_from(SPECIAL),
    st.sampled_from(ODD),
    st.sampled_from(
        [" ", "\n", "\t", "a", "x", "<", "<|im_", "hello world", " hello", "e\u0301", "１", "日本", "👩‍👩‍👧", "\x00", "▁"]
    ),
    NO_SURROGATES,
)
TEXTS = st.lists(BITS, min_size=1, max_size=14).map("".join).filter(bool)


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_str(make(name).decode())


@cache
def boundaries(name: str) -> SplitPoints:
    return SplitPoints(tokenizer(name))


def encoder(name: str, cache: PromptCache | None, pool: ThreadPoolExecutor, *, inline_bytes: int = 0) -> PromptEncoder:
    return PromptEncoder(make(name), CARD, executor=pool, inline_bytes=inline_bytes, cache=cache)


@pytest.fixture(scope="module")
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2)


@pytest.mark.parametrize("name", MAKES)
@settings(deadline=None)  # some examples load a tokenizer
@given(text=TEXTS)
def test_pieces_give_the_ids_of_the_whole(name: str, text: str) -> None:
    pieces = boundaries(name).split(text)
    assert "".join(pieces) == text
    apart = [i for piece in pieces for i in tokenizer(name).encode(piece, add_special_tokens=False).ids]
    assert apart == tokenizer(name).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", MAKES)
def test_every_tokenizer_of_chats_can_be_cut_at_its_markers(name: str) -> None:
    assert {"<|im_start|>", "<|im_end|>"} <= set(cut_tokens(tokenizer(name)))
    assert len(boundaries(name).split("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")) == 3


def test_added_tokens_that_may_not_be_seen_are_no_places_to_cut() -> None:
    assert set(cut_tokens(tokenizer("odd added tokens"))) - set(SPECIAL) == {"<r>", "<ab>", "<ok>"}


def test_a_tokenizer_that_reads_special_tokens_as_text_is_never_cut() -> None:
    blind = Tokenizer.from_str(make("byte BPE").decode())
    blind.encode_special_tokens = True
    assert SplitPoints(blind).split("<s>a<s>b") == ["<s>a<s>b"]


@pytest.mark.parametrize("offset", range(-14, 3))
def test_markers_on_the_edge_of_a_search_window_are_found(offset: int) -> None:
    before = "a" * ((1 << 16) + offset)
    pieces = boundaries("SmolLM2").split(before + "<|im_start|>b<|im_end|>")
    assert pieces == [before, "<|im_start|>b", "<|im_end|>"]


@pytest.mark.parametrize("name", MAKES)
@settings(deadline=None, max_examples=30)
@given(turns=st.lists(TEXTS, min_size=1, max_size=6), salt=st.none() | st.just("salt"))
def test_a_growing_conversation_costs_less_and_says_the_same(
    name: str, turns: list[str], salt: str | None, pool: ThreadPoolExecutor
) -> None:
    cache = PromptCache(1 << 20)
    cached, plain = shared_encoder(name, pool, cache), shared_encoder(name, pool, None)
    for count in range(1, len(turns) + 1):
        text = "".join(f"<|im_start|>user\n{turn}<|im_end|>\n" for turn in turns[:count])
        ours = cached.encode_now(text, add_special_tokens=False, limit=LIMIT, salt=salt)
        assert ours == plain.encode_now(text, add_special_tokens=False, limit=LIMIT, salt=salt)
        assert ours.hashes == pack_u64(block_chain(ours.packed, CARD.block_size, salt=salt))


@cache
def _bare(name: str, pool: ThreadPoolExecutor) -> PromptEncoder:
    return encoder(name, None, pool)


def shared_encoder(name: str, pool: ThreadPoolExecutor, cache: PromptCache | None) -> PromptEncoder:
    """Loading the bundled tokenizer takes long, so the memory is changed instead of the encoder."""
    twin = copy.copy(_bare(name, pool))
    twin._prompt_cache = cache
    return twin


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 2**32 - 1), max_size=1200), cut=st.integers(0, 1200), size=st.sampled_from([1, 3, 4]))
def test_hashes_are_those_of_the_plain_chain(ids: list[int], cut: int, size: int) -> None:
    cache = PromptCache(1 << 20)
    for some in (ids[:cut], ids, ids[: cut // 2] + ids):
        packed = pack_u32(some)
        for adapter, salt in ((None, None), ("poet", None), (None, "s"), ("poet", "s")):
            chain = pack_u64(block_chain(packed, size, adapter=adapter, salt=salt))
            assert cache.chain(packed, size, adapter=adapter, salt=salt) == chain


def test_the_next_turn_encodes_only_what_is_new(pool: ThreadPoolExecutor) -> None:
    told: list[tuple[int, int]] = []
    asked: list[list[str]] = []
    cache = PromptCache(1 << 20, on_reuse=lambda reused, encoded: told.append((reused, encoded)))
    ours = encoder("byte BPE", cache, pool)
    encode = ours._encode_pieces

    def counting(pieces: list[str], *, limit: LengthLimit) -> list[bytes]:
        asked.append(pieces)
        return encode(pieces, limit=limit)

    ours._encode_pieces = counting  # type: ignore[method-assign]
    first = "<|im_start|>system\nsea<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    ours.encode_now(first, add_special_tokens=False, limit=LIMIT)
    before = ours.encode_now(first, add_special_tokens=False, limit=LIMIT).tokens
    whole = ours.encode_now(first + "<|im_start|>user\nyo<|im_end|>", add_special_tokens=False, limit=LIMIT).tokens
    assert asked[1:] == [["<|im_start|>user\nyo", "<|im_end|>"]]
    assert told == [(0, before), (before, 0), (before, whole - before)]


def test_models_with_other_tokenizers_do_not_share(pool: ThreadPoolExecutor) -> None:
    cache = PromptCache(1 << 20)
    text = "<|im_start|>user\nhello<|im_end|>"
    for name in MAKES:
        ours = encoder(name, cache, pool).encode_now(text, add_special_tokens=False, limit=LIMIT)
        assert unpack_u32(ours.packed) == tokenizer(name).encode(text, add_special_tokens=False).ids


def test_what_the_tokenizer_adds_around_a_text_is_added_once(pool: ThreadPoolExecutor) -> None:
    ours = encoder("BOS by template", PromptCache(1 << 20), pool)
    text = "a</s>x</s>"
    for _ in range(2):
        ids = unpack_u32(ours.encode_now(text, add_special_tokens=True, limit=LIMIT).packed)
        assert ids == tokenizer("BOS by template").encode(text).ids
        assert ids[0] == tokenizer("BOS by template").token_to_id("<s>")


def test_the_memory_keeps_to_its_bounds_and_forgets_what_was_not_used() -> None:
    lru = ByteLru(2000)
    for i in range(50):
        lru.put_many([(i, b"x", 200)])
        lru.get_many([0])
        assert lru.size <= 2000
    assert len(lru) == 4
    assert [found is not None for found in lru.get_many([0, 46, 47, 48, 49])] == [True, False, True, True, True]
    lru.put_many([("huge", b"x", 5000)])
    assert (lru.get_many(["huge"]), len(lru)) == ([None], 4)


def test_a_memory_that_is_too_small_for_anything_changes_nothing(pool: ThreadPoolExecutor) -> None:
    cache = PromptCache(10)
    ours = encoder("byte BPE", cache, pool)
    text = "<s>a</s>b" * 30
    for _ in range(2):
        prompt = ours.encode_now(text, add_special_tokens=False, limit=LIMIT)
        assert unpack_u32(prompt.packed) == tokenizer("byte BPE").encode(text).ids
    assert cache.size == 0


def test_threads_may_share_it(pool: ThreadPoolExecutor) -> None:
    cache = PromptCache(20_000)
    ours, plain = encoder("byte BPE", cache, pool), encoder("byte BPE", None, pool)
    texts = ["".join(f"<s>hello {k % (i + 2)}</s>" for k in range(40)) for i in range(8)]
    expected = [plain.encode_now(text, add_special_tokens=False, limit=LIMIT) for text in texts]
    start = Barrier(4)

    def work(shift: int) -> list[bool]:
        start.wait(5)
        turns = [(i + shift) % len(texts) for i in range(40)]
        return [ours.encode_now(texts[i], add_special_tokens=False, limit=LIMIT) == expected[i] for i in turns]

    with ThreadPoolExecutor(4) as threads:
        assert all(all(result) for result in threads.map(work, range(4)))


def test_short_prompts_are_not_remembered(pool: ThreadPoolExecutor) -> None:
    cache = PromptCache(1 << 20)
    encoder("byte BPE", cache, pool, inline_bytes=100).encode_now("<s>a</s>", add_special_tokens=False, limit=LIMIT)
    assert cache.size == 0


def test_reuse_is_counted() -> None:
    metrics = Metrics()
    metrics.count_prefix(0, 7)
    metrics.count_prefix(5, 2)
    told = metrics.render().decode()
    for line in (
        'headrace_frontend_prefix_tokens_total{kind="reused"} 5.0',
        'headrace_frontend_prefix_tokens_total{kind="encoded"} 9.0',
        'headrace_frontend_prefix_prompts_total{result="hit"} 1.0',
        'headrace_frontend_prefix_prompts_total{result="miss"} 1.0',
    ):
        assert line in told
